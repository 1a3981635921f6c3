"""Pages that are files: one HTML file each, without further requests.

page        cards, tables and the file around them; page.html is its template
charts      curves, points with error bars, and bars, as SVG
comparison  comparison of records
"""
