"""Colours, markers and line styles that colour-blind people can tell apart. No import: a report draws without torch."""

# Okabe and Ito (2008), with black fifth; their orange and sky blue are darkened to 3:1 against white (WCAG 1.4.11).
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#C2629A", "#000000", "#A87200", "#3A87B8"]
STYLES = ["-", "--", "-.", ":"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h"]
