"""The picture of gradient compression: what a replica adds, sends, gets and remembers."""

from matplotlib.figure import Figure

_BOXES = [  # left, bottom, width, text, colour
    (0.0, 1.5, 2.6, "gradient of replica w", "#dbe9f6"),
    (0.0, 0.0, 2.6, "its memory", "#fbe6cf"),
    (3.8, 0.75, 2.2, "their sum, M", "#dbe9f6"),
    (7.2, 1.5, 2.9, "what is sent of M", "#e3f1dd"),
    (7.2, 0.0, 2.9, "M - what is sent of it", "#fbe6cf"),
    (11.3, 1.5, 3.3, "sum over replicas: update", "#ece2f3"),
]
_ARROWS = [((2.6, 1.9), (3.8, 1.25)), ((2.6, 0.4), (3.8, 1.05)), ((6.0, 1.25), (7.2, 1.9)), ((6.0, 1.05), (7.2, 0.4))]


def draw_compression() -> Figure:
    """Error feedback: what is not sent in this step is added to the gradient of the next."""
    figure = Figure(figsize=(7.2, 1.6))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.2, 14.9), ylim=(-0.9, 2.5))
    axes.axis("off")
    for left, bottom, width, text, color in _BOXES:
        box = {"facecolor": color, "edgecolor": "#444444", "linewidth": 0.7}
        axes.bar(left, 0.8, width, bottom, align="edge", **box)
        axes.text(left + width / 2, bottom + 0.4, text, ha="center", va="center", size=8)
    style = {"arrowstyle": "-|>", "color": "#444444", "linewidth": 0.7}
    for start, end in [*_ARROWS, ((10.1, 1.9), (11.3, 1.9))]:
        axes.annotate("", end, start, arrowprops=style)
    axes.annotate("", (1.3, 0.0), (8.6, 0.0), arrowprops=style | {"connectionstyle": "arc3,rad=-0.12"})
    axes.text(5.0, -0.35, "the next step's memory", ha="center", size=8, color="#555555", style="italic")
    return figure
