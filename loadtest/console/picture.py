"""Makes the picture of the README: `python -m loadtest.console.picture`."""

from pathlib import Path
from typing import Annotated

import typer

from loadtest.common.terminal import interruptible, run
from loadtest.console.browser import BUNDLES, chromium, service
from loadtest.errors import LoadtestError
from service.terminal import command_app, console

app = command_app()
_MOST_BYTES = 150_000
_SIZE = {"width": 1280, "height": 800}


@app.command()
def picture(
    out: Annotated[Path, typer.Option(help="PNG file.")] = Path("docs/console.png"),
    text: Annotated[str, typer.Option(help="Text whose attention is shown.")] = (
        "The animal did not cross the street because it was too tired."
    ),
) -> None:
    """Start the service, open the page of attention in chromium, and write a picture of it."""
    with interruptible(), service(BUNDLES) as running, chromium() as browser:
        page = browser.new_page(viewport=_SIZE, color_scheme="light")  # type: ignore[arg-type]
        page.goto(f"{running.address}/#/attention")
        page.get_by_label("Text", exact=True).fill(text)
        page.get_by_role("button", name="Show attention").click()
        page.get_by_text("Norm of the recurrent state").wait_for()
        page.get_by_role("button", name="Layer 2, head 8,").click()
        page.get_by_role("button", name="Layer 0, head 2,").nth(1).click()
        page.evaluate("scrollTo(0, document.querySelector('.twins.wide').offsetTop - 24)")
        page.mouse.move(640, 780)
        page.screenshot(path=out)
    size = out.stat().st_size
    if size > _MOST_BYTES:
        raise LoadtestError(f"{out} has {size} bytes, and the most is {_MOST_BYTES}: choose a smaller view")
    console.print(f"{out}: {size} bytes", highlight=False)


if __name__ == "__main__":
    run(app, "picture")
