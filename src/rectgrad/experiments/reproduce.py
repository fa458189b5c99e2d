"""Runs an experiment and writes its record and figures; both whole, or not at all."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image

from rectgrad.bench.environment import commit, environment
from rectgrad.data import DATASETS
from rectgrad.data.fetch import Watch, unwatched
from rectgrad.experiments import EXPERIMENTS
from rectgrad.experiments.lab import NO_PHOTOS, Lab
from rectgrad.photos import files
from rectgrad.training import repeatable

ENGINES = ("local", "ray")


def experiment(name: str) -> ModuleType:
    if name not in EXPERIMENTS:
        raise ValueError(f"unknown experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    return importlib.import_module(f"rectgrad.experiments.{EXPERIMENTS[name]}")


def reproduce(
    name: str,
    dataset: str = "shapes",
    preset: str = "quick",
    out: Path = Path("results"),
    device: str = "cpu",
    seed: int = 0,
    watch: Watch = unwatched,
    model: str | None = None,
    images: Path | None = None,
    figures: bool = True,
    engine: str = "local",
) -> Path:
    """The record of an experiment: made now, gone on with, or as it is where it is finished.

    model, images: for the experiments that show photos. figures: False leaves them to a later call, which
    draws what is missing and computes nothing again. engine: local, or ray where the experiment can use it.
    """
    module = experiment(name)
    if dataset not in DATASETS:
        raise ValueError(f"unknown dataset {dataset!r}; there are {', '.join(DATASETS)}")
    if preset not in module.PRESETS:
        raise ValueError(f"unknown preset {preset!r}; there are {', '.join(module.PRESETS)}")
    check_engine(name, engine)
    folder = out / dataset
    photos = getattr(module, "PHOTOS", False)
    lab = Lab(name, dataset, preset, module.PRESETS[preset], folder, device, seed, watch, photos)
    lab.engine = engine
    if photos:
        lab.model, lab.images = model, images
    path = folder / f"{name}.json"
    with repeatable():
        record = _known(path, lab)
        if record is None:
            _check_kept(path, preset)
            if photos:
                lab.gallery  # noqa: B018 - what is wrong with photos is said before the work
            record = _made(module, lab)
        if figures and not _drawn(folder, record):
            record["figures"] = [
                _saved(lab, key, page) for key, page in module.draw(lab, record["metrics"]).items()
            ]
            record["notes"] = list(dict.fromkeys([*record["notes"], *lab.notes]))
    files.save_json(record, path)
    lab.parts.clear()
    return path


def check_engine(name: str, engine: str) -> None:
    """Ray is for the experiments that say so; the others are short."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; there are {', '.join(ENGINES)}")
    if engine == "ray" and not getattr(experiment(name), "RAY", False):
        able = [each for each in EXPERIMENTS if getattr(experiment(each), "RAY", False)]
        raise ValueError(f"{name} runs locally; --engine ray is for {', '.join(able)}")


def _made(module: ModuleType, lab: Lab) -> dict[str, Any]:
    started = time.monotonic()
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
        "seconds": round(time.monotonic() - started, 1),  # of the last start
        "notes": lab.notes,
        "figures": None,
        "metrics": metrics,
    }


def _known(path: Path, lab: Lab) -> dict[str, Any] | None:
    """The record of these settings, where there is one."""
    found: dict[str, Any] = files.load_json(path) or {}
    if found.get("settings") != lab.settings():
        return None
    lacking = any(note.startswith(NO_PHOTOS) for note in found["notes"])
    return None if lacking and lab.gallery else found  # what was missing then is here now


def _check_kept(path: Path, preset: str) -> None:
    """A quick run does not take the place of a long one."""
    found: dict[str, Any] = files.load_json(path) or {}
    if preset == "quick" and found.get("preset") == "paper":
        raise ValueError(
            f"{path} is a record of the preset paper: keep it, and give another folder with --out"
        )


def _drawn(folder: Path, record: dict[str, Any]) -> bool:
    names = record["figures"]
    return names is not None and all((folder / name).exists() for name in names)


def _small(page: Image.Image) -> Image.Image:
    """The picture in 256 colours of its own: a third of the file."""
    return page.quantize(palette=page.quantize(256, kmeans=2), dither=Image.Dither.FLOYDSTEINBERG)


def _saved(lab: Lab, key: str, page: Any) -> str:
    """key: "" for the experiment's first figure."""
    name = f"{lab.experiment}-{key}.png" if key else f"{lab.experiment}.png"
    with files.whole(lab.out / name) as part:
        if isinstance(page, Image.Image):
            _small(page).save(part, format="PNG", optimize=True)
        else:
            page.savefig(part, format="png", dpi=110)
    return name
