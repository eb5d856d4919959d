"use strict";
// The theme: the system's, until the button chooses.
const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

const theme = document.getElementById("theme"), root = document.documentElement;
// What else changes with the theme.
const onTheme = [];
function labelTheme() {
  theme.querySelector(".word").textContent = isDark() ? "Light" : "Dark";
  theme.setAttribute("aria-pressed", String(isDark()));
  theme.setAttribute("aria-label", isDark() ? "Use light colors" : "Use dark colors");
}
function changeTheme() { labelTheme(); onTheme.forEach((change) => change()); }
theme.hidden = false;
theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; changeTheme(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changeTheme);
labelTheme();
