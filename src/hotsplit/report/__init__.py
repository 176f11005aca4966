"""The report: one page that shows what a plan does, how good it is, what it costs and how a run went.

Stands at the end of the flow, beside the terminal: `plan + histogram (+ test, rates, run) -> page`. numpy and the
standard library alone; it knows the files, and no engine.
"""
