"""The paper's experiments, a file each. `rectgrad reproduce ID` runs one; its record says what made it.

An experiment is a module with
    TITLE              one line
    PRESETS            its numbers for "quick" and for "paper"
    PAPER              what the paper found
    CAPTIONS           of its figures: what to see in them
    run(lab)           -> metrics, computed in parts that are never computed twice
    draw(lab, metrics) -> name: picture
    tables(metrics)    -> the numbers, the paper's beside ours where it has one
    findings(metrics)  -> which of the paper's sentences the numbers carry
    PHOTOS, RAY        True where it shows photos too, where it can run on Ray
"""

# id: module. Imported when run.
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
}
