"""The tables of results in the docs have the numbers of the records in results/."""

import json
import re
import shutil
from functools import cache, partial
from pathlib import Path

import pytest

from rectgrad.experiments.findings import VERDICTS
from rectgrad.experiments.report import _findings, _records, report
from rectgrad.experiments.roar_kar_findings import PAPER_AREAS
from rectgrad.methods.catalog import METHODS, title_of
from rectgrad.metrics.statistics import holm
from rectgrad.verdict.record import read

ROOT = Path(__file__).parent.parent
METHOD = {title_of(name).replace(" x ", " × "): name for name in METHODS}
METHOD |= {name: name for name in METHODS} | {"class-gated RectGrad": "rectgrad_gated"}
DATASET = {"CIFAR-10": "cifar10", "shapes": "shapes"}
NETWORKS = {
    "Lite0": ["efficientnet_lite0"],
    "CNN": [f"cifar10_cnn-{seed}" for seed in range(5)],
    "ResNet": ["cifar10_resnet"],
    "ViT": ["cifar10_vit"],
    "shapes": [f"shapes-{seed}" for seed in range(5)],
}
NETWORKS |= {f"{name} {i}": [each] for name, own in NETWORKS.items() for i, each in enumerate(own)}
MEASURES = {
    "insertion": "insertion_blur",
    "insertion, mean": "insertion_mean",
    "deletion": "deletion_blur",
    "deletion, mean": "deletion_mean",
    "ROAD": "road",
    "sensitivity-n": "sensitivity_n",
}


@cache
def record(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


@cache
def verdict(name):
    return read(ROOT / "results" / "verdicts" / name / "verdict.json")


@cache
def smaller(name):
    return read(ROOT / "results" / "why-this-class" / f"{name}.json")


def tables(page, after):
    """The tables after a text: lists of rows, each a list of cells; the first row has the titles."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count(after) == 1, after
    found = re.findall(r"(?:^\|.*\n)+", text.split(after)[1], flags=re.MULTILINE)
    return [[[c.strip() for c in row.strip("|").split(" |")] for row in t.splitlines()] for t in found]


def rounded(value, digits=2):
    return f"{value:.{digits}f}".replace("-0." + "0" * digits, "0." + "0" * digits)


def between(found, digits=2):
    """A mean with its interval."""
    low, high = found["interval"]
    return f"{rounded(found['mean'], digits)} ({rounded(low, digits)} to {rounded(high, digits)})"


def signed(value):
    return rounded(value, 3) if rounded(value, 3) == "0.000" else f"{value:+.3f}"


# Verdicts


def over_seeds(networks, measure, row):
    """The mean of a network, or the lowest and the highest one of several training seeds."""
    found = [rounded(verdict(each)["table"][measure][row]["mean"]) for each in networks]
    low, high = min(found, key=float), max(found, key=float)
    return low if low == high else f"{low} to {high}"


def measured(network):
    def cell(row, column):
        measure = MEASURES.get(column, column.replace(" ", "_"))
        return over_seeds(NETWORKS[network], measure, row.replace("control ", ""))

    return cell


def specificity(row, column):
    return over_seeds(NETWORKS[column.split(",")[0]], "specificity", row)


def gated(row, column):
    """The difference from RectGrad; bold if better, italic if worse."""
    measure = MEASURES.get(column, column.replace(" ", "_"))
    for pair in verdict(NETWORKS[row][0])["pairs"]:
        if pair["measure"] == measure and (pair["a"], pair["b"]) == ("rectgrad", "rectgrad_gated"):
            break
    mark = {"rectgrad_gated": "**", "rectgrad": "*", None: ""}[pair["better"]]
    text = f"{mark}{signed(-pair['difference'])}{mark} ({signed(-pair['high'])} to {signed(-pair['low'])})"
    text += f", p = {rounded(pair['holm'], 3).removesuffix('.000')}"
    return text + (f", n = {pair['n']}" if measure in ("grid_pointing", "randomisation") else "")


def same_sparsity(row, column):
    """LRP minus RectGrad with the same post-processing; bold if LRP is better, italic if RectGrad is."""
    steps = "times input, positive part" + ", same Gini index" * column.endswith("same sparsity")
    measure = MEASURES[column.split(",")[0]]
    for pair in verdict(NETWORKS[row][0])["matched"][steps]["pairs"]:
        if pair["measure"] == measure and {pair["a"], pair["b"]} == {"lrp", "rectgrad"}:
            break
    mark = {"lrp": "**", "rectgrad": "*", None: ""}[pair["better"]]
    return f"{mark}{signed(pair['difference'] * (1 if pair['a'] == 'lrp' else -1))}{mark}"


def pointing(row, column, runs="verdicts"):
    """The grid pointing game; bold if the method is an answer. Older records have the dropped grids."""
    name = NETWORKS[column][0]
    found = verdict(name) if runs == "verdicts" else smaller(name.removesuffix("-0"))
    grid = found["grid"]
    if row.startswith("grids"):
        return f"{grid['kept']} of {grid.get('tried', grid['kept'] + grid.get('dropped', 0)):,}"
    if row.startswith("photos"):
        cells = grid["shape"][0] * grid["shape"][1]
        return f"{cells}; {1 / cells:g}"
    row, answer = row.removeprefix("control "), found["answers"]["why this class"]
    mark = "**" * (answer != "inconclusive" and row in answer)
    return mark + rounded(found["table"]["grid_pointing"][row]["mean"]) + mark


FORMS = {
    "gated, no padding trick": "gated, no trick",
    "RectGrad, no padding trick": "rectgrad, no trick",
    "gated, q = 95, no padding trick": "gated, q=95, no trick",
    "c alone (HiResCAM)": "c alone",
    "g²": "g^2",
    "g⁴": "g^4",
    "c of RectGrad's R": "c of rectified R",
    "gate on the upper half of the layers": "top half",
    "gate on the upper quarter": "top quarter",
    "score minus the mean of all scores": "c against the mean",
    "log-probability": "c of log-probability",
    "soft, PR2": "rule=PR2, soft=0.5, power=1",
    "A": "rule=PR2, upper=0.8, normed=0.5, q=97.5, cut=0.35",
    "B": "rule=PR2, upper=0.7, normed=0.5, q=97.5, cut=0.3",
    "C": "rule=PR2, upper=0.8, normed=0.5, q=97.3, cut=0.35, top=0.7",
    "D": "rule=PR2, upper=0.8, normed=0.5, q=97.2, cut=0.45, top=0.6",
    "soft, 15 % of the units": "rule=PR2, upper=0.98, soft=0.5, least=85",
}


def form(row, column, half="even"):
    """Of the study of the gate."""
    name = FORMS.get(row, row.strip("*").replace("×", "x").replace("RectGrad", "rectgrad"))
    found = record(f"class-gate/efficientnet-lite0-{half}")["rows"][name]["mean"]
    mean, low, high = found["random class" if column == "random" else column]
    if column == "Gini":
        return rounded(mean)
    digits = 3 if column in ("deletion", "insertion") else 2
    return f"{rounded(mean, digits)} ({rounded(low)}–{rounded(high)})"


def other_form(row, column):
    return form("gated, no padding trick" if row == "gated" else row, column)


# Experiments


def same_steps(dataset):
    def cell(row, column):
        steps = "times input, positive part, padding trick, same Gini index"
        known = {"none": "no post-processing", "the same, cut to the same Gini index": steps}
        found = record(f"{dataset}/noise-level")["metrics"]["matched"]["outside"][known.get(row, row)]
        return rounded(found[METHOD[column]]["mean"]) if METHOD[column] in found else "–"

    return cell


def active(row, column):
    dataset = DATASET.get(column)
    return dataset and between(
        record(f"{dataset}/feature-frequency")["metrics"][f"conv{row[-1]}"]["beyond"], 3
    )


def zeroed(dataset):
    def cell(row, column):
        found = record(f"{dataset}/feature-occlusion")["metrics"][f"conv{row[-1]}"]
        keys = {"masks of other classes": "null", "beyond these": "beyond"}
        return between(found[keys[column]] if column in keys else found[column]["drop"], 1)

    return cell


def on_the_patch(row, column):
    dataset, _, cut = column.partition(", ")
    found = record(f"{DATASET[dataset]}/patch")["metrics"][METHOD[row]]
    return between(found["share_thresholded" if cut else "share"], 3)


def other_class(row, column):
    name = row.removeprefix("RectGrad, ").replace("the input", "input")
    found = record("cifar10/class-sensitivity")["metrics"]["dataset"][METHOD.get(name, name)]
    return rounded(found[f"rank {column.removesuffix(' class')}"]["mean"])


def attacked(row, column):
    what, _, dataset = column.rpartition(", ")
    key = {"attacked": "rank", "control": "rank_control", "edges": "edges"}[what]
    found = record(f"{DATASET[dataset]}/adversarial")["metrics"][METHOD[row]][key]
    return between(found) if key == "rank" else rounded(found["mean"])


def random_weights(row, column):
    name, *rest = row.split(", ")
    found = record(f"{DATASET[rest[-1]]}/sanity")["metrics"][METHOD[name]]
    key = "rank_absolute" if "absolute values" in rest else "rank"
    if column == "unrelated images":
        return rounded(found["floor"][key]["mean"])
    if column == "all layers":
        return between(found["cascading"][key][-1])
    stage = {"last layer": 0, "both dense layers": 1}[column]
    return rounded(found["cascading"][key][stage]["mean"])


def outer_ring(row, column):
    photos = row not in DATASET
    found = record(f"{DATASET.get(row, 'cifar10')}/padding-trick")["metrics"][
        "photos" if photos else "dataset"
    ]
    if column == "share of the area":
        return rounded(found["area"][0])
    return rounded(found["rectgrad"]["with" if column == "with it" else "without"][0]["mean"])


def on_cifar10(row, column):
    return random_weights(f"{row}, CIFAR-10", column)


def retrained(dataset):
    def cell(row, column):
        metrics = record(f"{dataset}/roar-kar")["metrics"]
        name, *blurred = row.split(", ")
        if column in ("ROAR", "KAR"):
            found = metrics[METHOD[name]][column.lower()]
            return between((found["blurred"] if blurred else found)["area"], 3)
        if blurred:
            return "–"
        if column == "ROAD":
            return between(metrics["road"][METHOD[name]]["most"])
        if column == "mask":
            return rounded(metrics[METHOD[name]]["mask"]["area"]["mean"])
        areas = dict(zip(("ROAR, paper", "KAR, paper"), PAPER_AREAS.get(METHOD[name], ()), strict=False))
        return rounded(areas[column], 4) if areas else "–"

    return cell


@cache
def findings():
    return _findings(_records(ROOT / "results"))


def controlled(row, column):
    """Bold if the finding that compares the area with the method's own is decided."""
    (mode, dataset), (name, what) = column.split(", "), row.split(", ")
    metrics = record(f"{DATASET[dataset]}/roar-kar")["metrics"]
    found = metrics["ties"].get(what) or metrics["samples"].get(METHOD[name], {}).get(what.split()[0])
    area = (found or metrics["swapped"][METHOD[name]]).get(mode.lower(), {}).get("area")
    if area is None:
        return "–"
    own = metrics[METHOD[name]][mode.lower()]["area"]
    compared = {f"{each['mean']:.4f}" for each in (area, own)}
    (finding,) = (
        each
        for each in findings()["roar-kar"][DATASET[dataset]]
        if f" {mode} area " in each.claim
        and set(re.findall(r"(?:^|against )(\S+)", each.because)) == compared
    )
    mark = "**" * (finding.holds is not None)
    return mark + between(area, 3) + mark


def seconds(row, column):
    """Of an experiment; in brackets if it ran, or ended, on a CPU."""
    if column not in DATASET:
        return None
    found = record(f"{DATASET[column]}/{row.strip('`')}")
    text = f"{found['seconds']:.0f}"
    return text if found["environment"]["gpu"] else f"({text})"


WHICH, GATED, EXPERIMENT = "docs/which-method.md", "docs/class-gated.md", "docs/experiments.md"


@pytest.mark.parametrize(
    ("page", "after", "index", "cell"),
    [
        (WHICH, "show why this class was chosen):", 0, specificity),
        (WHICH, "\n### LRP and RectGrad at equal sparsity\n", 0, same_sparsity),
        (WHICH, "\n## Why this class\n", 0, pointing),
        (WHICH, "\n### Smaller runs with integrated gradients\n", 0, partial(pointing, runs="smaller")),
        (WHICH, "\n## CIFAR-10 CNN\n", 0, measured("CNN")),
        (WHICH, "\n## CIFAR-10 ResNet\n", 0, measured("ResNet")),
        (WHICH, "\n## CIFAR-10 ViT\n", 0, measured("ViT")),
        (WHICH, "\n## Shapes\n", 0, measured("shapes")),
        (GATED, "\n## Numbers\n", 0, form),
        (GATED, "\n### What else was tried\n", 0, other_form),
        (GATED, "\n### The other half of the photos, and a soft threshold\n", 0, partial(form, half="odd")),
        (GATED, "\n### Forms that stay sparse\n", 0, partial(form, half="even-sparse")),
        (GATED, "\n## Other networks\n", 0, gated),
        (GATED, "\n## Other networks\n", 1, gated),
        (GATED, "\n## Other networks\n", 2, gated),
        (EXPERIMENT, "\n## The rule and the post-processing\n", 0, same_steps("cifar10")),
        (EXPERIMENT, "\n## The rule and the post-processing\n", 1, same_steps("shapes")),
        (EXPERIMENT, "\n## Are units as often active on the background?\n", 0, active),
        (EXPERIMENT, "\n## Do units on the object matter more?\n", 0, zeroed("cifar10")),
        (EXPERIMENT, "\n## Do units on the object matter more?\n", 1, zeroed("shapes")),
        (EXPERIMENT, "\n## An uninformative patch\n", 0, on_the_patch),
        (EXPERIMENT, "\n## Does the map depend on the class?\n", 0, other_class),
        (EXPERIMENT, "\n## Does the map change with an attack?\n", 0, attacked),
        (EXPERIMENT, "\n## Random weights\n", 0, random_weights),
        (EXPERIMENT, "\n## The padding trick\n", 0, outer_ring),
        (
            "docs/limits.md",
            "\n## RectGrad depends little on the layers that decide the class\n",
            0,
            on_cifar10,
        ),
        (EXPERIMENT, "\n## ROAR and KAR\n", 0, retrained("cifar10")),
        (EXPERIMENT, "\n## ROAR and KAR\n", 1, retrained("shapes")),
        (EXPERIMENT, "\n## ROAR and KAR\n", 2, controlled),
        (EXPERIMENT, "\n## Time\n", 0, seconds),
    ],
)
def test_a_table_has_the_numbers_of_its_records(page, after, index, cell):
    titles, _, *rows = tables(page, after)[index]
    for first, *cells in rows:
        row = first.replace("`", "")
        if row in ("better is", "goal"):
            continue
        for column, text in zip(titles[1:], cells, strict=True):
            wanted = cell(row, column)
            assert wanted is None or text == wanted, (row, column)


CLAIMS = {  # the start of a row in the tables of findings: a pattern of its claims in the report
    "RectGrad has the smallest share": "RectGrad has the smallest share",
    "The same, compared": "Its share outside the object is also smaller",
    "RectGrad has the smallest amount": "RectGrad has the smallest amount",
    "RectGrad has the lowest total": "RectGrad has the lowest total variation",
    "RectGrad's maps are the sparsest": "RectGrad's maps are the sparsest",
    "They are also sparser": "RectGrad's maps are also sparser",
    "For saliency, noise grows towards the input": r"For saliency, noise grows .* \(a \* R",
    "For RectGrad, noise falls": r"For RectGrad, noise falls .* \(a \* R",
    "Units are active as often": "In .* units are active as often",
    "Maps hardly change": "cnn: maps hardly change",
    "tau is close to 0": "cnn: tau is close to 0",
    "RectGrad's maps change most": "RectGrad's maps change most when",
    "Guided backprop and deconv": "Guided Backprop and Deconv reproduce",
    "Units on the object matter more": "In .* units on the object matter more",
    "Saliency is not zero": "Saliency maps are not zero",
    "RectGrad with PRR gives": r"RectGrad with PRR gives .* by share\.",
    "RectGrad and DeepLIFT give": r"RectGrad and DeepLIFT give .* by share\.",
    "RectGrad has the lowest ROAR": "RectGrad has the lowest ROAR",
    "RectGrad has the lowest KAR": "RectGrad has the lowest KAR",
    "The padding trick removes": "The padding trick removes",
    "The four rules": "The four rules",
    "RectGradMod": "RectGradMod",
    "Claim 1": "With tau = 0 and a small constant",
    "Claim 2": "With tau = 0, RectGrad equals",
    "Equal post-processing": "With RectGrad's post-processing .* share outside",
    "The same, cut": "With the same post-processing .* share outside",
    "For saliency, noise grows towards the input (the gradient": r"For saliency, .* \(the gradient",
    "RectGrad's maps for the least likely": "RectGrad's map for the least likely",
    "RectGrad depends less on the class": "RectGrad's maps depend less on the class",
    "When an attack changes the class": "The class causes the change",
    "RectGrad depends less on the weights": "RectGrad's maps depend less on the w|They are also more",
    "The shape of the removed": "The shape of the removed",
    "Methods whose masks reveal": "Methods whose masks reveal .* ROAR",
    "ROAR orders the methods": "ROAR orders the methods as ROAD does, given",
    "RectGrad has a lower ROAR": "RectGrad has a lower ROAR area than a blurred",
    "Class-gated RectGrad has": "Class-gated RectGrad has a lower ROAR area than RectGrad",
}


def stated(text):
    return re.findall(r"\d+\.?\d*(?:e-\d+)?", text)


def agrees(number, known):
    """Whether it is one of these, rounded, or in per cent."""
    unit = 0 if "e" in number else 10.0 ** -len(number.partition(".")[2])
    return any(abs(float(number) - each) <= 0.501 * unit for n in known for each in (n, 100 * n))


def test_the_findings_are_those_of_the_report():
    """The verdicts, after the correction over all findings, and the numbers beside them."""
    found = findings()
    papers, ours = tables(EXPERIMENT, "\n## What the paper says, what holds here, how we know\n")[:2]
    seen = set()
    for row, *cells in (*(row[:3] for row in papers[2:]), *ours[2:]):
        start = max((each for each in CLAIMS if row.startswith(each)), key=len)
        seen.add(start)
        for dataset, cell in zip(("cifar10", "shapes"), cells, strict=True):
            own = [
                (finding, experiment)
                for experiment, each in found.items()
                for finding in each.get(dataset, ())
                if re.match(CLAIMS[start], finding.claim)
            ]
            said = set(re.findall("does not hold|inconclusive|holds", cell))
            assert said == {VERDICTS[finding.holds] for finding, _ in own}, (row, dataset)
            known = [float(n) for each in found[own[0][1]][dataset] for n in stated(each.because)]
            assert all(agrees(number, known) for number in stated(cell)), (row, dataset)
    assert seen == CLAIMS.keys()


def test_the_report_is_that_of_the_records(tmp_path):
    """If not: `rectgrad reproduce report`."""
    shutil.copytree(ROOT / "results", tmp_path / "results")
    assert report(tmp_path / "results").read_bytes() == (ROOT / "results" / "report.html").read_bytes()


def test_the_smaller_correction_is_not_what_changed_the_answers():
    """Holm's correction of the verdicts for only the pairs that the runs with fewer methods have, too."""

    def corrected(name):
        few = smaller(name.removesuffix("-0"))
        kept = {(p["measure"], frozenset((p["a"], p["b"]))) for p in few["pairs"]}
        pairs = [p for p in verdict(name)["pairs"] if (p["measure"], frozenset((p["a"], p["b"]))) in kept]
        found = zip(pairs, holm([p["p"] for p in pairs]), strict=True)
        return {(p["a"], p["b"]): value for p, value in found if p["measure"] == "grid_pointing"}

    assert rounded(float(corrected("cifar10_cnn-0")["rectgrad_gated", "brightness"])) == "0.11"
    vit, controls = corrected("cifar10_vit"), verdict("cifar10_vit")["controls"]
    methods = {a for a, b in vit if b in controls and a not in controls}
    assert all(max(float(vit[method, control]) for control in controls) > 0.05 for method in methods)
    assert len(methods) == 7
