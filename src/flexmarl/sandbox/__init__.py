"""Boxes for code that a model wrote. In: files, code, commands. Out: what they printed, and how they ended.

interface.py   Sandbox, Box, BoxOutcome, Limits
settings.py    the section `sandbox` of a config: boxes of this machine, or of a service
driver.py      the program inside a box: interpreter of a session, commands, files
spare_boxes.py spare boxes, started ahead
probe.py       tries every guarantee; law 14: what is missing refuses the run
remote_*.py    boxes in kernels of a service: the program inside, and its calls with their retries
leased_sandboxes.py sandboxes that are open at a service, recorded for `flexmarl clean`
backends/      boxes on bubblewrap, with its filter of system calls and its control groups; on SandboxFusion; on E2B
"""
