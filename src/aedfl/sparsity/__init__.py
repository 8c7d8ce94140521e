"""Sparse training: what can be pruned, what it is worth, how much of it goes, and the smaller network."""

from .curvature import Curvature, curvature, hutchinson, hvp, rademacher
from .groups import ChannelGroups
from .lanczos import Spectrum, density, lanczos, mean_spectrum
from .loss_change import FORMS, Form, Probes, adapted, gauss_newton, loss_changes
from .objective import Objective, flat_loss
from .physical import Shrinker, Shrunk, grow, shrink
from .rate import cap, gap_rate, lipschitz, merge_rates
from .saliency import Saliency, draw, gradient_changes, saliency
from .scores import feature_ranks, magnitude
from .select import prune

__all__ = [
    "FORMS",
    "ChannelGroups",
    "Curvature",
    "Form",
    "Objective",
    "Probes",
    "Saliency",
    "Shrinker",
    "Shrunk",
    "Spectrum",
    "adapted",
    "cap",
    "curvature",
    "density",
    "draw",
    "feature_ranks",
    "flat_loss",
    "gap_rate",
    "gauss_newton",
    "gradient_changes",
    "grow",
    "hutchinson",
    "hvp",
    "lanczos",
    "lipschitz",
    "loss_changes",
    "magnitude",
    "mean_spectrum",
    "merge_rates",
    "prune",
    "rademacher",
    "saliency",
    "shrink",
]
