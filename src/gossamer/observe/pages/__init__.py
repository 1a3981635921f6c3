"""Pages that are files: one HTML file each, without further requests.

page    cards, tables and the file around them, with page.html as template; the page of a comparison
charts  curves, points with error bars, and bars, as SVG
"""
