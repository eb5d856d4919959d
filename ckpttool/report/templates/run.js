document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  const section = document.getElementById("drift");
  section.focus(); section.scrollIntoView();
});
performance.mark("ready");
