(() => {
    const box = (one) => one.getBoundingClientRect();
    const all = (names) => [...document.querySelectorAll(names)];
    return {
        width: document.documentElement.scrollWidth, window: document.documentElement.clientWidth,
        pictures: all(".picture svg").filter((one) => box(one).width)
            .map((one) => [one.closest("section").id, box(one).width, box(one).height]),
        cut: all(".picture text").filter((one) => {
            if (!box(one).width) return false;
            const text = box(one), whole = box(one.closest("svg"));
            return text.left < whole.left - 1 || text.right > whole.right + 1
                || text.top < whole.top - 1 || text.bottom > whole.bottom + 1;
        }).map((one) => one.textContent),
        wide: all("body *").filter((one) => box(one).right > innerWidth + 1 && !one.closest(".scroll, .picture, pre"))
            .map((one) => one.tagName + "." + one.className),
        paper: getComputedStyle(document.querySelector("section")).backgroundColor,
        drawn: getComputedStyle(document.querySelector(".picture path")).fill,
    };
})()
