"""ROAR and KAR: which pixels are removed, which networks are trained, areas and findings."""

import pytest
import torch

from rectgrad.experiments import leak, retraining, roar_kar
from rectgrad.experiments.retraining import Cell
from rectgrad.methods.catalog import METHODS, title_of

PAPER = roar_kar.PRESETS["paper"]


def test_the_papers_cells_come_first():
    cells = roar_kar.cells(PAPER)
    assert len(cells) == len(set(cells)) == len({cell.name for cell in cells})
    counts = {  # methods x modes x fractions x seeds
        "table": 10 * 2 * 5 * 3,
        "unmodified": 3,
        "mask": 10 * 5,
        "blurred": 10 * 2 * 5 + 2 * 2 * 5 * 2,
        "ties": 2 * 2 * 5 * 3,
        "swapped": 3 * 2 * 5 * 3,
        "samples": 4 * 5 * 3,
    }
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    assert [kind_of(cell) for cell in cells] == kinds
    assert {cell.seed for cell in cells[:300]} == {0, 1, 2}
    blurred = [cell for cell in cells if cell.variant == "blurred" and cell.seed]
    assert {cell.method for cell in blurred} == {"random", "rectgrad"}
    swapped = {(cell.mode, cell.variant) for cell in cells if kind_of(cell) == "swapped"}
    assert swapped == {("roar", "any picture"), ("kar", "same class")}


def kind_of(cell: Cell) -> str:
    if cell.fraction == 0:
        return "unmodified"
    if cell.mode == "mask" or cell.variant == "blurred":
        return cell.variant or cell.mode
    if " " in cell.method:
        return "samples"
    return "ties" if cell.variant.startswith("ties") else "swapped" if cell.variant else "table"


def test_a_number_of_samples_is_that_of_the_method():
    assert retraining.method_of("smoothgrad 10").samples == 10
    assert retraining.method_of("integrated_gradients 200").steps == 200
    assert retraining.method_of("rectgrad") is METHODS["rectgrad"]
    assert {cell.method for cell in roar_kar.cells(PAPER) if " " in cell.method} == {
        "smoothgrad 10",
        "smoothgrad 200",
        "integrated_gradients 10",
        "integrated_gradients 200",
    }


def test_roar_removes_what_kar_keeps():
    ranks = torch.arange(1024)
    for fraction in PAPER["fractions"]:
        gone = []
        for mode in ("roar", "kar", "mask"):
            hidden = Cell("rectgrad", mode, fraction, 0).hidden(0)
            gone.append((ranks >= hidden.low) & (ranks < hidden.high))
            assert hidden.mask_alone == (mode == "mask")
        assert torch.equal(gone[0], ~gone[1])
        assert torch.equal(gone[0], gone[2])
        assert int(gone[0].sum()) == round(1024 * fraction)
        assert gone[0][0]  # the most important pixel


def test_areas_by_hand():
    fractions = [0.1, 0.3, 0.5, 0.7, 0.9]
    assert roar_kar.area([0.5] * 5, fractions, "roar") == pytest.approx(0.5)
    assert roar_kar.area([0.5] * 5, fractions, "kar") == pytest.approx(0.5)
    falling = [0.9, 0.7, 0.5, 0.3, 0.1]
    assert roar_kar.area(falling, fractions, "roar") == pytest.approx(0.5)
    assert roar_kar.area([1, 0, 0, 0, 0], fractions, "roar") == pytest.approx(0.125)
    assert roar_kar.area([1, 0, 0, 0, 0], fractions, "kar") == pytest.approx(0.875)


# From accuracies to findings

ROAR = {"random": 0.60, "rectgrad": 0.50, "rectgrad_gated": 0.45, "saliency": 0.55, "smoothgrad": 0.57}
KAR = {"random": 0.40, "rectgrad": 0.35, "rectgrad_gated": 0.34, "saliency": 0.30, "smoothgrad": 0.39}
NUMBERS = {
    "methods": list(ROAR),
    "fractions": [0.1, 0.5, 0.9],
    "seeds": 3,
    "blurred": ["random", "rectgrad"],
    "ties": ["ties by gradient"],
    "swapped": ["rectgrad"],
    "samples": {"smoothgrad": [10]},
}


def metrics(roar=ROAR, kar=KAR, mask=0.1, seeds=3, **offsets: float) -> dict:
    """Flat curves with the given areas, spread over the seeds by 0.001. `offsets` add to the areas of a
    variant or of a number of samples."""
    numbers, accuracies = {**NUMBERS, "seeds": seeds}, {}
    for cell in roar_kar.cells(numbers):
        name = cell.method.split(" ")[0]
        areas = {"roar": roar[name], "kar": kar[name], "mask": mask}
        off = offsets.get((cell.variant or cell.method).replace(" ", "_"), 0.0)
        area = areas[cell.mode] + off + 0.001 * (cell.seed - 1)
        accuracies[cell] = 1 - area if cell.mode == "kar" else area
    found = roar_kar.summarise(accuracies, numbers)
    ordered = {name: {"mean": 0.2 + 0.1 * i, "std": 0.0, "n": 1} for i, name in enumerate(roar)}
    found["road"] = {name: {"most": each, "ordered": each} for name, each in ordered.items()}
    found["correlations"] = leak.correlations(roar_kar.columns(found))
    return found


def verdicts(given: dict) -> dict[str, bool | None]:
    return {finding.claim: finding.holds for finding in roar_kar.findings(given)}


def test_summaries_are_means_over_the_seeds_that_were_trained():
    found = metrics()
    area = found["rectgrad"]["roar"]["area"]
    assert (area["mean"], area["std"], area["n"]) == (pytest.approx(0.5), pytest.approx(0.001), 3)
    assert found["rectgrad"]["kar"]["area"]["mean"] == pytest.approx(0.35)
    assert [each["n"] for each in found["rectgrad"]["roar"]["blurred"]["accuracy"]] == [3, 3, 3]
    assert [each["n"] for each in found["saliency"]["roar"]["blurred"]["accuracy"]] == [1, 1, 1]
    assert found["saliency"]["mask"]["area"]["mean"] == pytest.approx(0.099)
    assert found["unmodified"]["mean"] == pytest.approx(0.6)
    assert found["ties"]["ties by gradient"]["kar"]["area"]["n"] == 3
    assert found["options"]["smoothgrad 10"].startswith("SmoothGrad(")
    assert "samples=10" in found["options"]["smoothgrad 10"]


def test_findings_follow_the_numbers():
    found = verdicts(metrics())
    assert found["RectGrad has the lowest ROAR area under the curve."] is True
    assert found["RectGrad has the lowest KAR area over the curve."] is False
    assert found["The shape of the removed region reveals nothing about the class (control)."] is True
    assert found["The two areas of the random baseline add up to 1, as expected (within 0.02)."] is True
    assert found["RectGrad has a lower ROAR area than a blurred random map."] is True
    assert found["Class-gated RectGrad has a lower ROAR area than RectGrad."] is True
    close = verdicts(metrics({**ROAR, "saliency": 0.5005, "random": 0.7}, mask=0.5))
    assert close["RectGrad has the lowest ROAR area under the curve."] is None
    assert close["The shape of the removed region reveals nothing about the class (control)."] is False
    assert close["The two areas of the random baseline add up to 1, as expected (within 0.02)."] is False


def test_controls_are_compared_over_seeds():
    claims = {
        "ties": "RectGrad's ROAR area is lower with ties by gradient than with random ties.",
        "any": "RectGrad has a lower ROAR area than with the regions of any other pictures.",
        "same": "RectGrad has a lower KAR area than with the regions of other pictures of the same class.",
        "samples": "SmoothGrad has a lower ROAR area with fewer evaluations (10 instead of 50).",
    }
    apart = verdicts(metrics(ties_by_gradient=-0.1, any_picture=0.1, same_class=-0.1, smoothgrad_10=0.1))
    assert [apart[claim] for claim in claims.values()] == [True, True, False, False]
    equal = verdicts(metrics(ties_by_gradient=0.001, any_picture=0.001, same_class=0.001))
    assert [equal[claim] for claim in claims.values()] == [None] * 4


def test_one_seed_is_inconclusive():
    found = roar_kar.findings(metrics(seeds=1))
    tested = [each for each in found if each.claim.startswith(("RectGrad", "Class-gated", "SmoothGrad"))]
    assert len(tested) >= 8
    assert all(each.holds is None and each.p is None for each in tested)


def test_the_papers_areas_stand_beside_ours():
    first, controls, correlations, *curves = roar_kar.tables(metrics())
    row = next(row for row in first.rows if row[0] == "RectGrad")
    assert row[1].startswith("0.5000 [0.49")
    assert (row[2], row[5]) == ("0.5385", "0.3382")
    gated = next(row for row in first.rows if row[0] == title_of("rectgrad_gated"))
    assert (gated[2], gated[5]) == ("–", "–")
    assert all(
        len(row) == len(table.head)
        for table in (first, controls, correlations, *curves)
        for row in table.rows
    )
