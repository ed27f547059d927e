"""Writes `docs/settings.md`, which lists all settings with defaults and meaning. Run it by `python -m service.settings_page`."""

from pathlib import Path

from service.settings import LIVE, PREFIX, Settings, default_of

_HEAD = f"""# Settings

Written by `python -m service.settings_page`; a test compares. [running.md](running.md#settings) says how to give them:
`attnserve serve --set NAME=VALUE`, a flag where `attnserve serve --help` lists one, the variable `{PREFIX}NAME` in the environment,
or a key of a YAML file (`--config`). Lists are written `a,b`. *Live*: the value can change while a cluster runs, in the part `user_config`
of its configuration.

| setting | default | meaning | live |
|---|---|---|---|
"""
_MIB = 2**20


def page() -> str:
    """Return the page as Markdown."""
    return _HEAD + "".join(
        f"| `{name}` | {_default(name)} | {_meaning(name)} | {'yes' if name in LIVE else ''} |\n" for name in Settings.model_fields
    )


def _default(name: str) -> str:
    """Return the default, of a number of bytes also in MiB."""
    value = Settings.model_fields[name].default
    size = f" ({value // _MIB} MiB)" if isinstance(value, int) and "bytes" in name and value >= _MIB else ""
    return f"`{default_of(name)}`{size}" if value is not None and default_of(name) != "none" else default_of(name)


def _meaning(name: str) -> str:
    return str(Settings.model_fields[name].description).replace("|", "\\|")  # a bare | would begin another cell


if __name__ == "__main__":
    Path("docs/settings.md").write_text(page(), encoding="utf-8")
