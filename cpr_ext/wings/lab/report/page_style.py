"""The style of a report page: readable on a phone, on a wide window and in print."""

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: #1a1a1a;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 56rem; margin: 0 auto; padding: 1rem 1rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 1.2rem 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; }
.lead { color: #444; margin-top: 0; overflow-wrap: anywhere; }
li { margin: .25rem 0; }
nav { padding: .5rem 0; border-bottom: 1px solid #ddd; }
figure { margin: .5rem 0 0; }
figure img { width: 100%; height: auto; display: block; }
figcaption, .small, footer { color: #555; font-size: .86rem; }
.small { overflow-wrap: anywhere; margin: .2rem 0 .8rem; }
.scroll { overflow-x: auto; border: 1px solid #ddd; border-radius: 4px; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #eee; }
thead th { background: #f4f4f4; white-space: normal; vertical-align: bottom; }
tbody th, thead th:first-child { text-align: left; position: sticky; left: 0; background: #fff;
  border-right: 1px solid #ddd; }
thead th:first-child { background: #f4f4f4; }
pre { background: #f4f4f4; padding: .6rem; border-radius: 4px; font-size: .82rem;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: .15rem 1rem;
  font-size: .9rem; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
footer { margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: .6rem; }
section + section { margin-top: 3rem; border-top: 3px solid #ddd; }
@media print {
  @page { margin: 14mm; }
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  nav { display: none; }
  h2 { break-after: avoid; }
  figure, tr { break-inside: avoid; }
  section + section { break-before: page; border: 0; }
  .scroll { overflow: visible; border: 0; }
  table { font-size: 6.3pt; } th, td { padding: 1.5pt 2.5pt; white-space: normal; }
  tbody th { position: static; }
}
"""
