"""The measures of a verdict: titles, directions, and the question that each one answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WHERE, WHY, HOW_MUCH = "where", "why this class", "how much"
QUESTIONS = {
    WHERE: "Which parts of the photo did the network use?",
    WHY: "Which parts speak for this class rather than another one?",
    HOW_MUCH: "How much does each part contribute to the score?",
}


class Measure(NamedTuple):
    """better: "higher", "lower", or None for a description that is neither good nor bad.

    question: the one that the measure answers. Measures without a question are checks: a map that does not
    depend on the network can pass them, so they do not rank methods.
    needs: "positions" (rows and columns), "classes" (two outputs or more), "masks".
    """

    name: str
    title: str
    unit: str  # the unit of work that computes it
    better: str | None
    question: str | None
    help: str
    citation: str
    needs: tuple[str, ...] = ()

    @property
    def ranked(self) -> bool:
        return self.question is not None

    def about(self) -> dict[str, str | None]:
        """What a record says of the measure."""
        named = ("title", "better", "question", "help", "citation")
        return {name: getattr(self, name) for name in named}

    @property
    def sign(self) -> int:
        """1 if higher is better, -1 if lower is."""
        return -1 if self.better == "lower" else 1


RISE, ROAD = "Petsiuk et al. 2018", "Rong et al. 2022"
SANITY, INFD = "Adebayo et al. 2018", "Yeh et al. 2019"
GRID = "Böhle et al. 2021; Rao et al. 2022"
PLACE, CLASS = ("positions",), ("classes",)
BOTH = PLACE + CLASS

_ALL = (
    Measure(
        "insertion_blur",
        "insertion (blurred)",
        "removal",
        "higher",
        WHERE,
        "Probability of the class as pixels replace a blurred copy, most important first; mean over steps.",
        RISE,
        PLACE,
    ),
    Measure(
        "insertion_mean",
        "insertion (mean colour)",
        "removal",
        "higher",
        WHERE,
        "The same, starting with the mean colour of the photo.",
        RISE,
        PLACE,
    ),
    Measure(
        "deletion_blur",
        "deletion (blurred)",
        "removal",
        "lower",
        WHERE,
        "Probability of the class as the most important pixels become those of a blurred copy.",
        RISE,
        PLACE,
    ),
    Measure(
        "deletion_mean",
        "deletion (mean colour)",
        "removal",
        "lower",
        WHERE,
        "The same, towards the mean colour of the photo.",
        RISE,
        PLACE,
    ),
    Measure(
        "road",
        "ROAD",
        "removal",
        "higher",
        WHERE,
        "Probability of the class after imputing the least relevant pixels, minus that after imputing the "
        "most relevant ones; mean over 10 to 90 % of the pixels.",
        ROAD,
        BOTH,
    ),
    Measure(
        "road_most",
        "ROAD (most relevant first)",
        "removal",
        "lower",
        None,
        "Probability of the class after imputing the most relevant pixels.",
        ROAD,
        BOTH,
    ),
    Measure(
        "road_least",
        "ROAD (least relevant first)",
        "removal",
        "higher",
        None,
        "Probability of the class after imputing the least relevant pixels.",
        ROAD,
        BOTH,
    ),
    Measure(
        "road_accuracy",
        "ROAD (accuracy)",
        "removal",
        "higher",
        None,
        "As ROAD, but with the share of photos whose top class is unchanged instead of its probability.",
        ROAD,
        BOTH,
    ),
    Measure(
        "inside",
        "inside the mask",
        "maps",
        "higher",
        WHERE,
        "Share of the absolute attribution on the object's mask.",
        "",
        ("positions", "masks"),
    ),
    Measure(
        "pointing_game",
        "pointing game",
        "maps",
        "higher",
        WHERE,
        "1 if the largest value is on the object's mask.",
        "Zhang et al. 2018",
        ("positions", "masks"),
    ),
    Measure(
        "grid_pointing",
        "grid pointing game",
        "grid",
        "higher",
        WHY,
        "Photos of different classes in one grid: share of the positive attribution in the cell of the class "
        "asked for. Chance is 1 / cells.",
        GRID,
        BOTH,
    ),
    Measure(
        "sensitivity_n",
        "sensitivity-n",
        "effects",
        "higher",
        HOW_MUCH,
        "Correlation of the attribution of random sets of pixels and the effect of removing them.",
        "Ancona et al. 2018",
        PLACE,
    ),
    Measure(
        "infidelity",
        "infidelity",
        "effects",
        "lower",
        HOW_MUCH,
        "Share of the score's changes under random squares that the map, at its best scale, does not "
        "predict. 1: predicts nothing.",
        INFD,
        PLACE,
    ),
    Measure(
        "specificity",
        "specificity",
        "maps",
        "higher",
        None,
        "Share of the most marked positions that change when the class with the smallest output is explained "
        "instead. 0: the map is the same for every class.",
        "",
        CLASS,
    ),
    Measure(
        "specificity_floor",
        "specificity of unrelated photos",
        "maps",
        None,
        None,
        "The specificity of maps of different photos: the value of maps that share no evidence.",
        "",
    ),
    Measure(
        "randomisation",
        "randomisation",
        "randomisation",
        "lower",
        None,
        "Similarity of the map and that of a network with random weights (rank correlation of absolute "
        "values), mean over stages from the output to the input. It should be near the floor.",
        SANITY,
    ),
    Measure(
        "randomisation_last",
        "randomisation (all layers)",
        "randomisation",
        "lower",
        None,
        "The same with all layers random.",
        SANITY,
    ),
    Measure(
        "randomisation_alone",
        "randomisation (layer by layer)",
        "randomisation",
        "lower",
        None,
        "The same with one group of layers random at a time.",
        SANITY,
    ),
    Measure(
        "randomisation_floor",
        "randomisation (floor)",
        "randomisation",
        None,
        None,
        "Similarity of the maps of different photos.",
        SANITY,
    ),
    Measure(
        "max_sensitivity",
        "max-sensitivity",
        "stability",
        "lower",
        None,
        "Largest relative change of the map under noise of 1 % of the value range.",
        INFD,
    ),
    Measure(
        "gini",
        "Gini index",
        "maps",
        None,
        None,
        "Sparsity: 0 if all values are equal, near 1 for one pixel.",
        "Chalasani et al. 2020",
    ),
    Measure(
        "zero_share",
        "zeros",
        "maps",
        None,
        None,
        "Share of values that are zero.",
        "",
    ),
    Measure(
        "total_variation",
        "total variation",
        "maps",
        None,
        None,
        "Differences between neighbours divided by the sum of absolute values: low for smooth maps.",
        "",
        PLACE,
    ),
)
MEASURES = {each.name: each for each in _ALL}


def chosen(given: str | Sequence[str]) -> tuple[str, ...]:
    """Measures by name; a name also selects those that begin with it: "road" selects "road_most" too."""
    if given == "all":
        return tuple(MEASURES)
    wanted = [each.strip() for each in given.split(",")] if isinstance(given, str) else list(given)
    for name in wanted:
        if not any(_belongs(each, name) for each in MEASURES):
            raise ValueError(f"unknown measure {name!r}; measures are {', '.join(MEASURES)}")
    return tuple(each for each in MEASURES if any(_belongs(each, name) for name in wanted))


def _belongs(measure: str, name: str) -> bool:
    return measure == name or measure.startswith(f"{name}_")
