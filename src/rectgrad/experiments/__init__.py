"""The paper's experiments, a file each. `rectgrad reproduce ID` runs one; its record says what made it.

An experiment is a module with
    TITLE           one line
    PRESETS         its numbers for "quick" and for "paper"
    run(lab)        -> metrics, computed in parts that are never computed twice
    draw(lab, metrics) -> name: picture
"""

# id: module. Imported when run.
EXPERIMENTS = {
    "patch": "patch",
    "feature-frequency": "feature_frequency",
    "noise-level": "noise_level",
    "rationale": "rationale",
    "claims": "claims",
}
