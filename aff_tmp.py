import sys,time,msgspec,io
from rollart.simulation.paper import *
from rollart.simulation.paper import paper_config,paper_cluster
from rollart.simulation.cluster import cluster_setup
from rollart.simulation.run import simulate
from rollart.simulation.workload import FAMILIES
from rollart.controller import events
from rollart.controller.events import parse_events
for aff in (None,"paper","auto"):
    c=paper_cluster("Qwen3-8B","rollart_plus"); cfg=paper_config(c,"rollart_plus",steps=5,seed=0,affinity=aff)
    t=time.time(); r=simulate(cluster_setup(c,cfg,FAMILIES),seed=0,check=False)
    ev=list(parse_events(io.BytesIO(r.events),"x"))
    props=[(round(e.t),e.task,e.order,e.reason) for e in ev if isinstance(e,events.AffinityProposed)]
    print(aff,r.outcome,r.violations[:2],round(r.rows[-1]["time"]-r.rows[0]["time"],1),[round(x["get_batch_seconds"],1) for x in r.rows],round(time.time()-t,1),props,flush=True)
