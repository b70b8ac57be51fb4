"""The sizes of the exchange that ``benchmarks.controller`` measures; peers run it without RollArt installed."""

TURNS = 10
FIRST_TOKENS, ANSWER_TOKENS, OBSERVATION_TOKENS = 64, 16, 32
