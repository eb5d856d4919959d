"""The browser in the terminal: what it shows, told without a widget, and the widgets that show it."""
