"""The beginning of HTML pages: one file each, no scripts, for light and dark mode."""

HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --ink: #30343a; --paper: #fdfdfc; --faint: #8a909955; --shade: #8a909922; }
@media (prefers-color-scheme: dark) { :root { --ink: #d8dbe0; --paper: #17191d; } }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin-top: 2.5rem; border-bottom: 1px solid var(--faint); }
"""
"""HTML up to the styles of the page, which follow."""
