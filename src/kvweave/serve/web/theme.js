// A classic script, so that the theme is set before anything is painted.
(() => {
  const root = document.documentElement;
  const kept = () => {
    try { return localStorage.getItem("kvweave.theme"); } catch { return null; }
  };
  const theme = kept();
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
})();
