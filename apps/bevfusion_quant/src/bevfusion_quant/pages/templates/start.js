function fail(error) {
  const place = byId("failure");
  place.hidden = false;
  place.textContent = `Part of this page could not be drawn (${error.message}). Chrome 123, Firefox 120, Safari 17.5 or later can.`;
  console.error(error);
}

for (const start of [startTheme, startScene, startTabs, startChart, startTables, startHistograms, startLists, startNavigation]) {
  try {
    Promise.resolve(start()).catch(fail);
  } catch (error) { fail(error); }
}
document.documentElement.dataset.ready = "true";
