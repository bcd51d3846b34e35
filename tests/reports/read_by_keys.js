(() => [...document.querySelectorAll(".picture")].map((box) => {
    const press = (key) => box.dispatchEvent(new KeyboardEvent("keydown", {key}));
    const svg = [...box.children].find((one) => one.getClientRects().length);
    const titles = [...svg.querySelectorAll("title")].map((one) => one.textContent), read = [];
    box.focus();
    press("Home");
    for (const _ of titles) {
        read.push(box.nextElementSibling.textContent);
        press("ArrowRight");
    }
    return {name: box.closest("section").id, isFocused: document.activeElement === box, titles, read};
}))()
