def resolve_model_data_config(model):
    return {
        "input_size": (3, 40, 48),
        "interpolation": "bilinear",
        "mean": (0.1, 0.2, 0.3),
        "std": (0.4, 0.5, 0.6),
        "crop_pct": 0.9,
        "crop_mode": "center",
    }
