"""The part of huggingface_hub's interface that rectgrad uses. FILES: what can be "downloaded"."""

FILES: dict[tuple[str, str], str] = {}


def hf_hub_download(repo_id: str, filename: str) -> str:
    if (repo_id, filename) not in FILES:
        raise ConnectionError("no network\nafter five attempts")
    return FILES[repo_id, filename]
