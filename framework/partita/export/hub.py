"""Upload of a model with its page to the Hub."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from partita.export.model_card import CardFacts, model_card
from partita.export.repository import license_of, read_repository
from partita.export.shared_paths import without_local_paths
from partita.lm.training.saving import PAGE
from partita.report.run_record import RunRecord, read_run
from partita.runs.manifest import MANIFESTS
from partita_schema.errors import DataError, JobError, PartitaError
from partita_schema.load import LoadedConfig


def push(
    name: str,
    *,
    private: bool,
    dry_run: Path | None,
    save: Callable[[Path], Any],
    loaded: LoadedConfig,
    run: Path | None,
) -> str:
    """Upload a model with its page to a repository, created if missing, and return its URL.

    Args:
        name: Name of the repository.
        private: Whether a new repository is private.
        dry_run: Folder to write in place of the upload, whose path is returned; None to upload.
        save: Writes the model into a folder.
        loaded: The configuration.
        run: The run's directory; None for a model without a run.

    Raises:
        PartitaError: The name is not valid, or the folder of a dry run is not empty.
        JobError: The Hub cannot be reached, or refuses the upload.
    """
    check_name(name)

    def write(folder: Path) -> None:
        save(folder)
        write_page(folder, name=name, loaded=loaded, run=run)
        without_local_paths(folder)

    if dry_run is not None:
        if dry_run.exists() and (not dry_run.is_dir() or any(dry_run.iterdir())):
            raise DataError(f"{dry_run} exists and is not an empty folder; name another folder for the dry run")
        write(dry_run)
        return str(dry_run)
    return upload(name, private=private, write=write)


def check_name(name: str) -> None:
    """Raise PartitaError if the Hub allows no repository of this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it has no __all__

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise PartitaError(f"{name!r} is no name of a repository: {error}") from None


def upload(name: str, *, private: bool, write: Callable[[Path], Any]) -> str:
    """Upload what `write` writes into a folder, and return the URL of the repository.

    Raises JobError if the Hub cannot be reached, or refuses the upload.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))  # before a repository is created, which would stay empty if this fails
            repository = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Upload from partita")
    except (HfHubHTTPError, httpx2.HTTPError) as error:
        reason = " ".join(str(error).split())
        raise JobError(
            f"the Hub did not take the upload to {name}: {reason}; check the name, the connection, and that the token "
            "of `hf auth login` may write there"
        ) from error
    return str(repository)


def write_page(folder: Path, *, name: str, loaded: LoadedConfig, run: Path | None) -> None:
    """Write the model card of a saved model.

    Args:
        folder: Folder of the saved model.
        name: Name of the repository.
        loaded: The configuration.
        run: The run's directory; None for a model without a run.
    """
    config = loaded.config.model_dump(mode="json", exclude_unset=True)
    repository = read_repository(folder, config, origin=loaded.folder)
    base = config.get("base_model")
    local = loaded.folder / Path(base).expanduser() if repository.local_base and isinstance(base, str) else None
    record = record_of(run)
    text = record.config_text if record is not None else ""
    facts = CardFacts(
        name=name,
        repository=repository,
        config=config,
        config_text=text or loaded.text or yaml.safe_dump(config, sort_keys=False),
        run=record,
        license=license_of(local if local is not None else repository.base),
        origin=loaded.folder,
    )
    (folder / PAGE).write_text(model_card(facts), encoding="utf8")


def record_of(run: Path | None) -> RunRecord | None:
    """Return what a run has recorded; None without a run, or if its results cannot be read."""
    if run is None or not (run / MANIFESTS[0]).is_file():
        return None
    try:
        return read_run(run)
    except PartitaError:
        return None
