"""Runs an experiment and writes its record and figures atomically."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
from PIL import Image

from rectgrad.bench.environment import commit, environment
from rectgrad.data import DATASETS
from rectgrad.data.fetch import Progress, no_progress
from rectgrad.experiments import EXPERIMENTS
from rectgrad.experiments.lab import NO_PHOTOS, Lab
from rectgrad.methods.catalog import METHODS
from rectgrad.photos import files
from rectgrad.training import deterministic

ENGINES = ("local", "ray")
QUALITY = 80  # of sheets of pictures: a quarter of their size as PNG


def experiment(name: str) -> ModuleType:
    if name not in EXPERIMENTS:
        raise ValueError(f"unknown experiment {name!r}; experiments are {', '.join(EXPERIMENTS)}")
    return importlib.import_module(f"rectgrad.experiments.{EXPERIMENTS[name]}")


def reproduce(
    name: str,
    dataset: str = "shapes",
    preset: str = "quick",
    out: Path = Path("results"),
    device: str = "cpu",
    seed: int = 0,
    progress: Progress = no_progress,
    model: str | None = None,
    images: Path | None = None,
    figures: bool = True,
    engine: str = "local",
    again: bool = False,
) -> Path:
    """Runs an experiment and returns the path of its record. An interrupted experiment resumes.

    `model` and `images` apply to experiments that show photos. With `figures=False`, figures are left to a
    later call, which recomputes nothing. `engine` is local, or ray if the experiment supports it. `again`
    recomputes an existing record with the same settings.
    """
    module = experiment(name)
    if dataset not in DATASETS:
        raise ValueError(f"unknown dataset {dataset!r}; datasets are {', '.join(DATASETS)}")
    if preset not in module.PRESETS:
        raise ValueError(f"unknown preset {preset!r}; presets are {', '.join(module.PRESETS)}")
    check_engine(name, engine)
    folder = out / dataset
    photos = getattr(module, "PHOTOS", False)
    lab = Lab(name, dataset, preset, module.PRESETS[preset], folder, device, seed, progress, photos)
    lab.engine = engine
    if photos:
        lab.model, lab.images = model, images
    path = folder / f"{name}.json"
    files.remove_partial_files(folder)
    with deterministic():
        record = None if again else _load(path, lab)
        if record is None:
            _check_overwrite(path, preset)
            if photos:
                lab.gallery  # noqa: B018 - reports unreadable photos before the work
            record = _compute(module, lab)
        if figures and not _has_figures(folder, record):
            record["figures"] = [
                _save_figure(lab, key, page) for key, page in module.draw(lab, record["metrics"]).items()
            ]
            record["notes"] = list(dict.fromkeys([*record["notes"], *lab.notes]))
    files.save_json(record, path)
    lab.parts.clear()
    return path


def check_engine(name: str, engine: str) -> None:
    """Raises an error if the experiment does not support the engine."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; engines are {', '.join(ENGINES)}")
    if engine == "ray" and not getattr(experiment(name), "RAY", False):
        supported = [each for each in EXPERIMENTS if getattr(experiment(each), "RAY", False)]
        raise ValueError(f"{name} does not support --engine ray, only {', '.join(supported)} does")


def _compute(module: ModuleType, lab: Lab) -> dict[str, Any]:
    lab.parts.start()
    metrics = module.run(lab)
    return {
        "experiment": lab.experiment,
        "title": module.TITLE,
        "dataset": lab.dataset_name,
        "preset": lab.preset,
        "settings": lab.settings(),
        "seed": lab.seed,
        "environment": environment(lab.device),
        "commit": commit(),
        "code": lab.code,
        "data": lab.data(),
        "weights": lab.weights(),
        "accuracy": lab.accuracy(),
        "methods": {name: repr(METHODS[name]) for name in sorted(_names(metrics) & set(METHODS))},
        "seconds": round(lab.parts.seconds(), 1),  # over all starts
        "notes": lab.notes,
        "figures": None,
        "metrics": metrics,
    }


def _names(value: Any) -> set[str]:
    """All keys in a record."""
    if isinstance(value, list):
        return {name for each in value for name in _names(each)}
    return set(value).union(*map(_names, value.values())) if isinstance(value, dict) else set()


def _load(path: Path, lab: Lab) -> dict[str, Any] | None:
    """The existing record with these settings, if any."""
    record = files.load_record(path)
    if record.get("settings") != lab.settings() or outdated(record):
        return None
    lacks_photos = any(note.startswith(NO_PHOTOS) for note in record["notes"])
    return None if lacks_photos and lab.gallery else record  # photos are available now


def outdated(record: dict[str, Any]) -> bool:
    """Whether an earlier version made the record, whose metrics have another form. Those did not save a hash
    of their code."""
    return "code" not in record


def _check_overwrite(path: Path, preset: str) -> None:
    """A quick run does not overwrite the record of a long one."""
    record = files.load_record(path)
    if preset == "quick" and record.get("preset") == "paper":
        raise ValueError(
            f"{path} is a record of the preset `paper`, which a quick run would overwrite; choose another "
            "folder with --out"
        )


def _has_figures(folder: Path, record: dict[str, Any]) -> bool:
    names = record["figures"]
    return names is not None and all((folder / name).exists() for name in names)


def _save_figure(lab: Lab, key: str, page: Any) -> str:
    """Writes a figure, pictures as WebP and plots as SVG, and returns its file name; the key of the main
    figure is empty."""
    picture = isinstance(page, Image.Image)
    name = f"{lab.experiment}{f'-{key}' if key else ''}.{'webp' if picture else 'svg'}"
    with files.atomic(lab.out / name) as part:
        if picture:
            page.convert("RGB").save(part, format="WEBP", quality=QUALITY, method=6)
        else:
            with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": lab.experiment}):
                page.savefig(part, format="svg", metadata={"Date": None})
    return name
