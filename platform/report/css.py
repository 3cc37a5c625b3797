"""The look of the page: dark on light, one column of a phone to three of a desk, and black on white in print."""

CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 84rem; color: #1a1a1a; background: #fff;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-top: .6rem; border-top: 2px solid #1a1a1a; }
p, li, figcaption { max-width: 48rem; overflow-wrap: anywhere; }
.answer { font-size: 1.2rem; line-height: 1.45; max-width: 56rem; }
.lacks { padding: .6rem .8rem; border-left: 4px solid #8a5a00; background: #fdf6e7; max-width: 56rem; }
nav ol { columns: 16rem; padding-left: 1.4rem; font-size: .95rem; }
a { color: #00508c; }
figure { margin: 0 0 1rem; }
figcaption, .note { color: #3a3a3a; font-size: .92rem; margin: .5rem 0; }
.panels { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 26rem)); }
.panels img { width: 100%; height: auto; display: block; align-self: start; }
.scroll { overflow-x: auto; max-width: 100%; margin: .8rem 0; border: 1px solid #d0d0d0; }
.scroll:focus-visible, a:focus-visible { outline: 3px solid #0072B2; outline-offset: 1px; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: .3rem .65rem; text-align: left; vertical-align: top; border-bottom: 1px solid #e2e2e2; }
th, td { white-space: nowrap; }
.long { white-space: normal; min-width: 15rem; max-width: 44rem; overflow-wrap: break-word; }
thead th { background: #f0f0f0; border-bottom: 1px solid #8a8a8a; vertical-align: bottom; }
tbody th { font-weight: 600; }
@media print {
  @page { margin: 14mm; }
  body { max-width: none; padding: 0; font-size: 9.5pt; color: #000; }
  nav { display: none; }
  h2 { break-after: avoid; }
  a, figcaption, .note { color: #000; }
  .lacks, thead th { background: #fff; }
  .panels { grid-template-columns: 1fr 1fr; gap: .4rem; }
  .panels img, tr { break-inside: avoid; }
  .scroll { overflow: visible; border: 0; }
  table { font-size: 7.5pt; min-width: 0; width: 100%; }
  th, td { padding: .15rem .3rem; white-space: normal; overflow-wrap: break-word; }
  .long { min-width: 3cm; max-width: none; overflow-wrap: anywhere; }
  .wide { font-size: 6.5pt; }
  .wide th, .wide td { padding: .1rem .15rem; }
  .wide .long { min-width: 2.2cm; }
  p, li, figcaption, .answer, .lacks { max-width: none; }
}
"""
