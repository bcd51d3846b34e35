// The answers of the page "Does it fit?": between simulated lengths, as `parts_at` and `curve` of fit_points.py say.
const UNIT = 2 ** 16, GIB = 2 ** 30;
const [CONTEXT, UNUSED] = ["CUDA context", "reserved, not in use"];
const WORDS = {fits: "Yes", tight: "Too close to tell", over: "No"};
const SIGNS = {fits: "✓", tight: "~", over: "✗"};
const at = (id) => document.getElementById(id);
const gib = (size) => (size / GIB).toFixed(2);
const three = (value) => Number(value.toPrecision(3)).toLocaleString("en");

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

function between(lengths, values, length) {
  if (length === null || length <= (lengths[0] ?? 0)) return values[0];
  const place = lengths.findIndex((one) => length <= one);
  if (place < 0) return values.at(-1);
  const share = (length - lengths[place - 1]) / (lengths[place] - lengths[place - 1]);
  return values[place - 1] + (values[place] - values[place - 1]) * share;
}

const sum = (values) => values.reduce((whole, one) => whole + one, 0);

// The place of the first of the three lengths around one.
function firstNear(length, known) {
  const found = known.findIndex((one) => one >= length), last = known.length - 1;
  const above = Math.min(Math.max(found < 0 ? last : found, 1), last);
  const isBelowNearer = above > 1 && length ** 2 < known[above - 1] * known[above];
  return Math.max(Math.min(isBelowNearer ? above - 2 : above - 1, known.length - 3), 0);
}

// The weights of the values at some lengths in the polynomial through them.
function weightsAt(length, nodes) {
  return nodes.map((node) => nodes.reduce((weight, other) =>
    other === node ? weight : weight * (length - other) / (node - other), 1));
}

function curve(lengths, values, length) {
  if (length === null || length <= lengths[0] || length >= lengths.at(-1)) return between(lengths, values, length);
  const first = firstNear(length, lengths);
  const weights = weightsAt(length, lengths.slice(first, first + 3));
  return sum(weights.map((weight, place) => weight * values[first + place]));
}

async function started() {
  const known = JSON.parse(new TextDecoder().decode(await unpacked(FIGURES)));
  const steps = new Int16Array(await unpacked(SECONDS));
  const rows = new Map(known.rows.map((row) => [[row.model, row.method, row.kernels].join(), row]));
  const names = [...document.querySelectorAll("#bar g[data-part]")].map((mark) => mark.dataset.part);
  const components = names.slice(1, -1);

  function rowOf(model, method, gpu) {
    return rows.get([model, method, known.gpus[gpu].kernels].join());
  }

  // The weights of the logits: with the fused loss they are on a line over the rows of a chunk.
  function logitsWeightsAt(length, nodes, chunk) {
    if (!chunk) return weightsAt(length, nodes);
    const rowsAt = (one) => one / Math.ceil(one / Math.max(1, Math.floor(Math.max(known.chunk_bytes, chunk[1] * one) / chunk[0])));
    const rows = nodes.map(rowsAt), mean = sum(rows) / rows.length;
    const slope = (rowsAt(length) - mean) / Math.max(sum(rows.map((one) => (one - mean) ** 2)), 1);
    return rows.map((one) => 1 / rows.length + slope * (one - mean));
  }

  // The components of the fullest moment.
  function componentsAt(row, length) {
    if (length === null) return row.pieces[0][1][0][0].map((size) => UNIT * size);
    const all = [...row.pieces.slice(0, -1).map(([nodes]) => nodes[0]), ...row.pieces.at(-1)[0]];
    length = Math.min(Math.max(length, all[0]), all.at(-1));
    const [nodes, sizesOfMoments] = row.pieces[firstNear(length, all)];
    const weights = weightsAt(length, nodes), ofLogits = logitsWeightsAt(length, nodes, row.chunk);
    const moments = sizesOfMoments.map((sizes) => components.map((_, place) => {
      const chosen = place === known.logits ? ofLogits : weights;
      return UNIT * sum(sizes.map((at, node) => chosen[node] * at[place]));
    }));
    return moments.reduce((fullest, one) => sum(one) > sum(fullest) ? one : fullest);
  }

  // Bytes by part, and the verdict; null where it was not simulated.
  function answer(model, gpu, method, length) {
    const row = rowOf(model, method, gpu), card = known.gpus[gpu];
    if (!row || row.reason) return null;
    const parts = {[CONTEXT]: card.context}, sizes = componentsAt(row, length);
    let allocated = 0;
    components.forEach((name, place) => {
      if (name === "workspace" && card.large) sizes[place] += known.larger_workspaces;
      allocated += parts[name] = sizes[place];
    });
    parts[UNUSED] = Math.max((between(row.simulated, row.shares, length) - 1) * allocated, 0);
    const total = sum(Object.values(parts)), spare = card.usable - total;
    return {parts, total, spare, verdict: spare < 0 ? "over" : spare < card.margin ? "tight" : "fits"};
  }

  function secondsOf(model, gpu, method, length) {
    const row = rowOf(model, method, gpu);
    if (row.at === null) return null;
    const last = known.order[row.kernels].indexOf(gpu), count = row.lengths.length;
    const own = row.lengths.map((_, place) => {
      let step = 0;
      for (let one = 0; one <= last; one++) step += steps[row.at + one * count + place];
      return 1e-4 * 2 ** (step / 256);
    });
    return curve(row.lengths, own, length);
  }

  // What is asked for: of the address, and changed by the form.
  const asked = {model: "Qwen2.5-1.5B", gpu: "RTX 3060 12GB", method: "lora", length: "512"};
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const isKnown = {model: () => known.rows.some((row) => row.model === value), gpu: () => value in known.gpus,
                     method: () => value in known.titles, length: () => Number(value) > 0}[name];
    if (isKnown?.()) asked[name] = value;
  }

  function show() {
    const {model, gpu, method} = asked, card = known.gpus[gpu];
    const first = known.rows.find((row) => row.model === model && row.lengths), row = rowOf(model, method, gpu);
    const lengths = first?.lengths ?? [null], hasText = lengths[0] !== null;
    const [low, high] = [lengths[0] ?? 0, lengths.at(-1) ?? 0];
    const given = Math.round(Number(asked.length)) || low;
    const length = hasText ? Math.min(Math.max(given, low), high) : null;
    for (const name of ["model", "gpu"]) if (document.activeElement !== at(name)) at(name).value = asked[name];
    document.querySelector(`input[value="${method}"]`).checked = true;
    if (document.activeElement !== at("length")) at("length").value = length ?? "";
    Object.assign(at("length"), {min: low, max: high, disabled: !hasText});
    at("length-note").textContent = !hasText ? "Its inputs have one size; there is no length to choose."
      : given === length ? `${low} to ${high.toLocaleString("en")} tokens.`
      : `${given.toLocaleString("en")} is outside ${low} to ${high.toLocaleString("en")} tokens${high < 4096 ? ", all that the model takes" : ""}; shown for ${length.toLocaleString("en")}.`;
    history.replaceState(null, "", `#${new URLSearchParams({...asked, length: length ?? ""})}`);

    const found = answer(model, gpu, method, length);
    const what = `${model}, ${known.titles[method]}${hasText ? `, examples of ${length.toLocaleString("en")} tokens` : ""}, on ${gpu}`;
    at("headline").textContent = what;
    const sizes = found ? `: ${gib(found.total)} of ${gib(card.usable)} GiB` : "";
    const verdict = found?.verdict ?? "tight";
    at("verdict").className = `verdict is-${verdict}`;
    at("answer").textContent = (found ? WORDS[verdict] : "Not simulated") + sizes;
    at("methods").replaceChildren(...Object.keys(known.titles).map((one) => {
      const other = answer(model, gpu, one, length), item = document.createElement("li");
      item.className = `badge ${other?.verdict ?? ""}${one === method ? " chosen" : ""}`;
      item.textContent = other ? `${SIGNS[other.verdict]} ${known.titles[one]} ${gib(other.total)} GiB` : `? ${known.titles[one]}`;
      return item;
    }));
    document.title = `${found ? WORDS[verdict] : "Not simulated"}${sizes}: ${what}`;
    at("total").textContent = found ? `${gib(found.total)} of ${gib(card.usable)} GiB` : "-";
    at("spare").textContent = !found ? (row?.reason ?? "This set-up was not simulated.")
      : `${gib(Math.abs(found.spare))} GiB ${found.spare < 0 ? "too much" : "free"}`;
    const seconds = found && secondsOf(model, gpu, method, length);
    at("seconds").textContent = seconds ? `${three(seconds)} s` : "-";
    at("speed").textContent = !seconds ? "not predicted for this model"
      : hasText ? `${three(known.examples * length / seconds)} tokens/s` : `${three(known.examples / seconds)} images/s`;
    at("parameters").textContent = first ? `${three(first.parameters / 1e9)} B` : "-";
    at("precision").textContent = found ? `computed in ${row.precision}` : "";
    at("micro").textContent = found ? `${row.rows} x ${known.examples / row.rows}` : "-";
    at("steps").textContent = found ? "examples at a time x times a step" : "";
    draw(found, card, gpu);
    map(model, gpu, method, length, lengths);
    const fitting = Object.keys(known.gpus).filter((name) => answer(model, name, method, length)?.verdict === "fits");
    fitting.sort((one, other) => known.gpus[one].usable - known.gpus[other].usable);
    const smallest = fitting[0] ? `The smallest GPU that fits it is ${fitting[0]}.` : "No GPU of this page fits it.";
    const streamed = answer(model, gpu, "streamed", length), ram = rowOf(model, "streamed", gpu)?.host_bytes;
    const layers = streamed?.verdict !== "fits" ? "" : method === "streamed" ? `It needs ${gib(ram)} GiB of RAM.`
      : `LoRA with layers in RAM fits ${gpu}: ${gib(streamed.total)} GiB, and ${gib(ram)} GiB of RAM. `;
    at("instead").textContent = verdict !== "fits" ? layers + smallest : method === "streamed" ? layers : "";
    at("others").textContent = fitting.slice(0, 8).join(", ") || "None of the GPUs of this page.";
    const option = hasText ? ` -s ${length}` : "";
    at("command").firstElementChild.textContent = `hf-memopt plan ${model} --gpu "${gpu}"${option} --method ${method === "streamed" ? "lora" : method}`;
  }

  function draw(found, card, gpu) {
    const whole = 1.04 * Math.max(card.usable, found?.total ?? 0), cells = at("parts").rows;
    let left = 0;
    names.forEach((name, place) => {
      const size = found?.parts[name] ?? 0, mark = document.querySelector(`#bar g[data-part="${name}"]`);
      const [x, width] = [1000 * left / whole, 1000 * size / whole];
      mark.firstElementChild.textContent = `${name}: ${gib(size)} GiB`;
      mark.lastElementChild.setAttribute("d", `M${x} 4h${width}v52h${-width}z`);
      cells[place].lastElementChild.textContent = gib(size);
      left += size;
    });
    cells[names.length].lastElementChild.textContent = gib(left);
    const line = 1000 * card.usable / whole;
    at("line").setAttribute("d", `M${line} 0v60`);
    at("axis-end").textContent = `red line: ${gpu}, ${gib(card.usable)} GiB usable; the bar ends at ${gib(whole)} GiB`;
  }

  function map(model, gpu, method, length, lengths) {
    const powers = lengths[0] === null ? [null] : [64, 128, 256, 512, 1024, 2048, 4096]
      .filter((one) => one >= lengths[0] && one <= lengths.at(-1));
    const cell = (kind, text, name = "") => Object.assign(document.createElement(kind), {textContent: text, className: name});
    const head = document.createElement("tr");
    head.append(cell("th", "tokens"), ...powers.map((one) => cell("th", one?.toLocaleString("en") ?? "-", "n")));
    at("map").tHead.replaceChildren(head);
    at("map").tBodies[0].replaceChildren(...Object.keys(known.titles).map((one) => {
      const row = document.createElement("tr");
      row.append(cell("td", known.titles[one]), ...powers.map((tokens) => {
        const found = answer(model, gpu, one, tokens);
        const here = one === method && tokens === length ? " here" : "";
        return cell("td", found ? `${SIGNS[found.verdict]} ${gib(found.total)}` : "-", `n ${found?.verdict ?? ""}${here}`);
      }));
      return row;
    }));
  }

  at("asked").addEventListener("input", (event) => {
    const {id, name, value} = event.target;
    const isKnown = {model: () => known.rows.some((row) => row.model === value), gpu: () => value in known.gpus}[id];
    if (isKnown && !isKnown()) return;  // a name that is being typed
    asked[name || id] = value;
    show();
  });
  for (const name of ["model", "gpu"]) {
    at(name).addEventListener("focus", () => at(name).select());
    at(name).addEventListener("blur", show);  // what is no name gives way to the last one
  }
  at("asked").hidden = at("answers").hidden = false;
  at("length").addEventListener("change", show);
  at("asked").addEventListener("submit", (event) => event.preventDefault());
  window.fit = {answer, secondsOf, known};
  show();
}

window.ready = started();
