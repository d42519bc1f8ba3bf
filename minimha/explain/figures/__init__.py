"""Figures of a trace, drawn as SVG: the flow of data, heatmaps, blocks, bars and angles."""

from minimha.explain.figures.gallery import figures, svg

__all__ = ["figures", "svg"]
