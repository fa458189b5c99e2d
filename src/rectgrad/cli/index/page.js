// Filters and sorts the cards. Without this script, the page shows all cards sorted by file name.
const list = document.getElementById("cards");
const cards = [...list.children];
const [text, show, sort, count] = ["text", "show", "sort", "count"].map((id) => document.getElementById(id));

const shown = {
  all: () => true,
  low: (card) => card.dataset.low === "1",
  high: (card) => card.dataset.low === "0" && card.dataset.specificity !== "",
  warned: (card) => card.dataset.warned === "1",
};

function filter() {
  const wanted = text.value.trim().toLowerCase();
  let visible = 0;
  for (const card of cards) {
    const words = `${card.dataset.class} ${card.dataset.name}`.toLowerCase();
    card.hidden = !(words.includes(wanted) && shown[show.value](card));
    visible += !card.hidden;
  }
  count.textContent = `${visible} of ${cards.length} shown`;
}

function order() {
  const down = sort.value.startsWith("-");
  const key = sort.value.replace("-", "");
  const numeric = key === "confidence" || key === "specificity";
  const value = (card) => card.dataset[key];
  const compare = numeric
    ? (a, b) => (value(a) === "") - (value(b) === "") || (value(a) - value(b)) * (down ? -1 : 1)
    : (a, b) => value(a).localeCompare(value(b));
  list.append(...[...cards].sort((a, b) => compare(a, b) || a.dataset.name.localeCompare(b.dataset.name)));
}

text.addEventListener("input", filter);
show.addEventListener("input", filter);
sort.addEventListener("input", order);
document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
document.getElementById("controls").hidden = false;
filter();
order();
