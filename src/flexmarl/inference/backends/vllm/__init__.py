"""vLLM's `AsyncLLM` behind `inference/interface.py`: ids in, ids out, weights of the trainer.

vllm_engine      requests, aborts and loads; a load ends what runs and continues it with the new weights
vllm_requests    a request, in vLLM's words
served_versions  the versions that are loaded: adapters of several policies, the last versions of each
vllm_start       the factory, which imports vLLM
engine_args      settings -> vLLM's arguments, refused by key
handed_weights   a tensor tree in anonymous memory, which another process of the machine maps
vllm_worker      what runs in vLLM's own processes: the weight transfer `flexmarl`, which vLLM finds as its plug-in

    process of the engine                            vLLM's processes
    VllmEngine ── requests, aborts ───────────────►  engine core ─► workers
               ── weights, by name of the memory ─►                 map, check and load them
"""
