"""The paper's experiments, one file each. `rectgrad reproduce ID` runs one and writes its record.

An experiment is a module with
    TITLE              one line
    PRESETS            its parameters for "quick" and "paper"
    PAPER              what the paper found
    CAPTIONS           captions of its figures: what to look for
    run(lab)           -> metrics, computed in parts that are cached on disk
    draw(lab, metrics) -> figures by name
    tables(metrics)    -> the numbers, next to the paper's where it has them
    findings(metrics)  -> which of the paper's claims the numbers support
    PHOTOS, RAY        True if it shows photos, and if it can run on Ray
"""

# id -> module, which is imported when the experiment runs
EXPERIMENTS = {
    "patch": "patch",
    "feature-occlusion": "feature_occlusion",
    "feature-frequency": "feature_frequency",
    "feature-maps": "feature_maps",
    "threshold": "threshold",
    "coherence": "coherence",
    "accumulation": "accumulation",
    "adversarial": "adversarial",
    "noise-level": "noise_level",
    "roar-kar": "roar_kar",
    "rationale": "rationale",
    "claims": "claims",
    "sanity": "sanity",
    "class-sensitivity": "class_sensitivity",
    "padding-trick": "padding_trick",
}
