"""What should be hot: sizes and histograms in, a plan with its proof out. numpy only, one planner for every engine.

The flow inside: `checkpoint -> sizes`, `dialects -> histogram`, both `-> planner -> planfile`; while a model runs,
`rebalance` corrects what the planner chose, and `learned` and `rerank` carry what it saw into the next start.
"""
