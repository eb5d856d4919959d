// The film can be stopped, and stands still at first for readers who prefer that.
const film = document.getElementById("film"), pause = document.getElementById("pause");
if (pause) {
  const still = document.createElement("canvas");
  still.hidden = true; still.setAttribute("role", "img"); still.setAttribute("aria-label", film.alt);
  film.after(still);
  const stop = (stopped) => {
    if (stopped) {
      still.width = film.naturalWidth; still.height = film.naturalHeight;
      still.getContext("2d").drawImage(film, 0, 0);
    }
    still.hidden = !stopped; film.hidden = stopped;
    pause.textContent = stopped ? "Play" : "Pause";
  };
  pause.hidden = false;
  pause.addEventListener("click", () => stop(still.hidden));
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) film.decode().then(() => stop(true), () => {});
}
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  const section = document.getElementById("drift");
  section.focus(); section.scrollIntoView();
});
performance.mark("ready");
