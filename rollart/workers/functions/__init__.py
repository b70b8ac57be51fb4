"""The local function host: ``python -m rollart.workers functions``.

Reward functions run in an elastic pool of processes behind HTTP.  A function's *template* process imports it once and
forks *instances*, which serve calls; ``scaling`` decides how many there are, with nothing but numbers in and out.
"""
