"""`spconv` where it is absent: its documented interface on this package's own kernels.

`use_standin` registers each file of this folder under the name of spconv's module, which the file
gives itself as its ``__name__``. Its classes and functions take that name too, so every question
that goes by the name of a class (weight layout, kind of layer, tables) has one answer for spconv
and for the stand-in. Written from spconv's documentation and its behaviour; no source of spconv is
in here.
"""
