"""Where experts live: hot and cold rows, the row map, the counters, and the swaps between them.

The flow inside: `source -> build -> rows -> route -> live -> swap -> publish`. An engine implements ExpertSource,
holds one Banks and drives it (forward, tick, close); bank never learns which engine it serves.
"""
