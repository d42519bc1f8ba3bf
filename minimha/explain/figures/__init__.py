"""Draw figures of a trace as SVG: flow chart, heatmaps, blocks, weights and angles."""

from minimha.explain.figures.gallery import figures, svg

__all__ = ["figures", "svg"]
