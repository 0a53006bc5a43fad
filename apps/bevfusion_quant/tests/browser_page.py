"""What tests ask of a page that a browser shows."""

from __future__ import annotations

from typing import Any

__all__ = ["values", "wait"]


def wait(browser: Any, condition: str) -> None:
    """Until the condition holds; the script's time limit is the error."""
    browser.execute_async_script(
        "const done = arguments[0];"
        f"const look = () => ({condition}) ? done() : requestAnimationFrame(look); look();"
    )


def values(browser: Any, expression: str) -> Any:
    """What an expression of the page's script is."""
    return browser.execute_script(f"return {expression}")
