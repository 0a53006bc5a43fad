"""The colour of every solid: car paint, clothes, house fronts, signs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bev_scenes._solids import Material, SceneObject, Solid
from bev_scenes._street import Street

__all__ = ["colours_of"]

_Colour = tuple[float, float, float]

# Linear red, green, blue: shares of the light sent back.
_PLAIN: dict[Material, _Colour] = {
    Material.ASPHALT: (0.10, 0.10, 0.105),
    Material.MARKING: (0.70, 0.70, 0.66),
    Material.CONCRETE: (0.36, 0.35, 0.33),
    Material.GRASS: (0.11, 0.19, 0.04),
    Material.FACADE: (0.45, 0.38, 0.30),
    Material.WALL: (0.55, 0.52, 0.46),
    Material.GLASS: (0.03, 0.04, 0.05),
    Material.CAR_PAINT: (0.30, 0.30, 0.30),
    Material.RUBBER: (0.018, 0.018, 0.02),
    Material.METAL: (0.20, 0.21, 0.22),
    Material.FOLIAGE: (0.07, 0.15, 0.025),
    Material.BARK: (0.11, 0.075, 0.05),
    Material.CLOTH: (0.20, 0.20, 0.20),
    Material.SKIN: (0.50, 0.31, 0.22),
    Material.RETROREFLECTOR: (0.90, 0.90, 0.88),
    Material.PLASTIC: (0.25, 0.25, 0.25),
    Material.ROOF: (0.28, 0.10, 0.06),
    Material.WOOD: (0.18, 0.09, 0.045),
}
_PAINTS: tuple[_Colour, ...] = (
    (0.75, 0.75, 0.74), (0.60, 0.61, 0.62), (0.28, 0.29, 0.31), (0.12, 0.12, 0.13),
    (0.03, 0.03, 0.035), (0.55, 0.03, 0.03), (0.30, 0.02, 0.03), (0.03, 0.09, 0.36),
    (0.02, 0.04, 0.14), (0.05, 0.19, 0.28), (0.04, 0.14, 0.07), (0.55, 0.40, 0.05),
)  # fmt: skip
_FRONTS: tuple[_Colour, ...] = (
    (0.36, 0.13, 0.08), (0.28, 0.11, 0.07), (0.55, 0.47, 0.33), (0.62, 0.59, 0.52),
    (0.50, 0.36, 0.18), (0.40, 0.42, 0.42), (0.33, 0.38, 0.43), (0.47, 0.30, 0.22),
)  # fmt: skip
_ROOFS: tuple[_Colour, ...] = ((0.27, 0.09, 0.05), (0.19, 0.08, 0.06), (0.08, 0.08, 0.09))
_SHIRTS: tuple[_Colour, ...] = (
    (0.62, 0.08, 0.07), (0.07, 0.16, 0.45), (0.65, 0.64, 0.60), (0.06, 0.30, 0.20),
    (0.70, 0.48, 0.06), (0.05, 0.05, 0.06), (0.40, 0.12, 0.34), (0.20, 0.42, 0.55),
)  # fmt: skip
_TROUSERS: tuple[_Colour, ...] = (
    (0.03, 0.05, 0.12), (0.025, 0.025, 0.03), (0.10, 0.10, 0.11), (0.28, 0.22, 0.14),
)  # fmt: skip
_BUSES: tuple[_Colour, ...] = ((0.60, 0.06, 0.04), (0.62, 0.42, 0.04), (0.05, 0.22, 0.42))
_HAIR: tuple[_Colour, ...] = (
    (0.02, 0.015, 0.01), (0.08, 0.04, 0.02), (0.30, 0.20, 0.09), (0.32, 0.31, 0.30),
)  # fmt: skip
_RED, _AMBER, _GREEN = (0.75, 0.03, 0.02), (0.85, 0.45, 0.03), (0.03, 0.60, 0.25)


def colours_of(street: Street, seed: int) -> npt.NDArray[np.float64]:
    """Colour of every solid [solids, 3], in the order of `gather`; linear, 0 to 1."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 4])))
    draws = rng.random((len(street.objects), 2)).tolist()
    return np.array(
        [
            _colour(thing, solid, *draws[k])
            for k, thing in enumerate(street.objects)
            for solid in thing.solids
        ]
    )


def _pick(palette: tuple[_Colour, ...], draw: float) -> _Colour:
    return palette[int(draw * len(palette))]


def _colour(thing: SceneObject, solid: Solid, first: float, second: float) -> _Colour:
    made_of, high = solid.material, solid.centre[2]
    if made_of == Material.CAR_PAINT:
        if thing.name == "construction_vehicle":
            return 0.80, 0.45, 0.03
        return _pick(_BUSES if thing.name == "bus" else _PAINTS, first)
    if made_of == Material.CLOTH:
        low = solid.centre[2] < 0.45 * thing.size[2]
        return _pick(_TROUSERS, second) if low else _pick(_SHIRTS, first)
    if made_of in (Material.FACADE, Material.WALL):
        red, green, blue = _pick(_FRONTS, first)
        if made_of == Material.WALL:  # cornices and bays are of paler stone
            return 0.5 * red + 0.28, 0.5 * green + 0.27, 0.5 * blue + 0.25
        return red, green, blue
    if made_of == Material.ROOF:
        return _pick(_ROOFS, second)
    if made_of == Material.RETROREFLECTOR and thing.name == "sign":
        return (0.03, 0.10, 0.45) if first < 0.5 else (0.70, 0.03, 0.03)
    if made_of == Material.RETROREFLECTOR and high > 0.6 and thing.name != "traffic_cone":
        return (0.85, 0.85, 0.80) if solid.centre[0] > 0 else (0.55, 0.02, 0.02)
    if made_of == Material.PLASTIC:
        if thing.name == "traffic_cone":
            return 0.85, 0.22, 0.02
        if thing.name == "barrier":
            return (0.70, 0.06, 0.04) if high < 0.5 else (0.78, 0.76, 0.72)
        if thing.name == "traffic_light":
            return 0.02, 0.022, 0.02
        if thing.name == "pedestrian":
            return _pick(_HAIR, second)
        return _pick(_SHIRTS, second)
    if made_of == Material.GLASS and thing.name == "traffic_light":
        return _RED if high > 3.05 else _AMBER if high > 2.8 else _GREEN
    if made_of == Material.METAL and thing.name in ("truck", "trailer") and solid.size[2] > 1.0:
        return _pick(((0.68, 0.68, 0.66), (0.50, 0.52, 0.54), (0.14, 0.24, 0.42)), second)
    if made_of == Material.FOLIAGE:
        warm, lush = 0.6 + 0.9 * first, 0.75 + 0.5 * second
        return 0.07 * warm * lush, 0.15 * lush, 0.025 * lush
    return _PLAIN[made_of]
