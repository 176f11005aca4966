"""What cuda_check.py runs: every figure of the CUDA backend beside its bound, and every claim about its bytes.

The flow inside: `device` is the one seam, a GPU (cuda_device) or stand-ins on a CPU (dry_device); a `bench` holds it with
the sizes and the clock; each check yields `findings` as they come; a `report` keeps them in a table and in JSON.

    machine    attributes, link, NUMA nodes, and where cold rows can lie
    links      rates of the GPU's memory and of the link: the bounds of all that follows
    reads      cold rows read in place, and copied beside that
    layers     routed experts of one layer, wherever they lie
    replays    swaps beside captured graphs, and mutants that must be found
    costs      what routes, publishes and swaps in flight cost a step
"""
