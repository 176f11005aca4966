"""A reference histogram and a live sample of the same model become one.

Between `histogram` and `planner`: the result goes where a histogram goes. Both sides are normalised per layer before
they are added, so that a reference of 10**9 pairs and a live hour weigh what the user says, not what they were long.

Shapes: L MoE layers, E routed experts per layer.

    >>> from hotsplit.plan.histogram import PhaseCounts
    >>> from hotsplit.plan.identity import ModelIdentity
    >>> toy = ModelIdentity(layers=(0,), num_experts=2, top_k=1)
    >>> old = Histogram(identity=toy, phases={"decode": PhaseCounts(counts=np.array([[3e9, 1e9]]))})
    >>> new = Histogram(identity=toy, phases={"decode": PhaseCounts(counts=np.array([[0.0, 60_000.0]]))})
    >>> merge(old, new, live_weight=1.0).phases["decode"].counts
    array([[0.75, 1.25]])
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from hotsplit.errors import ConfigError, HistogramError
from hotsplit.notices import Notice
from hotsplit.plan.combine import merge_shares
from hotsplit.plan.histogram import PHASES, Histogram, quantisation_notices, tokens_per_layer
from hotsplit.plan.identity import require_same

MIN_TOKENS = 50_000
"""Decode tokens per layer that a live sample must have before it may move a reference."""


def merge(reference: Histogram, live: Histogram, *, live_weight: float = 1.0) -> Histogram:
    """Add a live sample to a reference: per phase and layer, shares of the reference + weight x shares of live.

    Args:
        reference: Counts of any scale.
        live: Counts of the same model, of any scale.
        live_weight: What the live shares weigh; the reference's weigh 1.

    Returns:
        A normalised histogram under the reference's name. A layer or phase that only one side counted is that
        side's alone.

    Raises:
        PlanMismatchError: The two are of different models.
        ConfigError: The weight is negative or not finite.
    """
    if not (math.isfinite(live_weight) and live_weight >= 0):
        raise ConfigError("live weight", got=str(live_weight), wanted="a finite number >= 0", value=live_weight)
    require_same(live.identity, reference.identity, what="the live sample")
    merged, _ = merge_shares([reference, live], weights=[1.0, live_weight])
    source = {"reference": dict(reference.source), "live": dict(live.source), "live_weight": live_weight}
    return replace(merged, source=source)


def rerank(
    reference: Histogram,
    live: Histogram,
    *,
    live_weight: float = 1.0,
    min_tokens: int = MIN_TOKENS,
    what: str = "the live sample",
) -> tuple[Histogram, list[Notice]]:
    """Merge, once the live sample is large enough to be believed and of the same model.

    Args:
        reference: Counts of any scale.
        live: Numbers of pairs, or scaled counts that carry their number of tokens.
        live_weight: What the live shares weigh; the reference's weigh 1.
        min_tokens: Decode tokens that every layer of `live` must have; 0 asks for nothing.
        what: Live, for messages.

    Returns:
        The merged histogram; notices on what could not be compared and what one side alone decides.

    Raises:
        HistogramError: A layer of `live` has too few decode tokens, or nobody knows how many it has; names it.
        PlanMismatchError: The two are of different models; names the field.
        ConfigError: The weight is negative or not finite.
    """
    notices = require_same(live.identity, reference.identity, what=what)
    notices += quantisation_notices(live.quantisation, reference.quantisation, what=what)
    _require_tokens(live, top_k=live.identity.top_k or reference.identity.top_k, min_tokens=min_tokens, what=what)
    for phase in PHASES:
        if phase in live.phases and phase not in reference.phases:
            text = f"the reference has no {phase} counts: those of the result are the live sample's alone"
            notices.append(Notice(name="live-alone", text=text, strict=False))
    return merge(reference, live, live_weight=live_weight), notices


def fewest_tokens(histogram: Histogram, *, top_k: int | None) -> tuple[int, float] | None:
    """The layer with the fewest decode tokens.

    Args:
        histogram: Counts.
        top_k: Experts per token; None where not known.

    Returns:
        Decoder layer index and tokens; None where nobody can tell.
    """
    tokens_L = tokens_per_layer(histogram, phase="decode", top_k=top_k)
    if tokens_L is None:
        return None
    layer_id = int(np.argmin(tokens_L))
    return histogram.layers[layer_id], float(tokens_L[layer_id])


def _require_tokens(live: Histogram, *, top_k: int | None, min_tokens: int, what: str) -> None:
    """Raise for the layer with the fewest decode tokens, if they are too few."""
    if min_tokens <= 0:
        return
    do = "count more traffic, or lower --min-tokens"
    fewest = fewest_tokens(live, top_k=top_k)
    if fewest is None:
        got = "counts that do not say how many decode tokens they come from"
        raise HistogramError(what, got=got, wanted=f"at least {min_tokens} per layer", do=do)
    layer, tokens = fewest
    if tokens < min_tokens:
        got, wanted = f"{_whole(tokens)} decode tokens", f"at least {min_tokens}"
        raise HistogramError(f"{what}, layer {layer}", got=got, wanted=wanted, do=do, layer=layer, value=tokens)


def _whole(tokens: float) -> str:
    """49,999.75 tokens are not 50000."""
    return str(math.floor(tokens))
