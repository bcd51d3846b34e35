(() => {
    const shown = (one) => one.checkVisibility();
    const number = (colour) => (colour.match(/[\d.]+/g) || []).map(Number);
    const light = (colour) => {
        const [red, green, blue] = number(colour).map((part) => part / 255)
            .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const contrast = (one, other) => {
        const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    const opaque = (colour) => colour.startsWith("rgb") && !(number(colour)[3] < 0.5);
    const behind = (text) => {  // what is painted under the middle of a text
        text.scrollIntoView({block: "center"});
        const box = text.getBoundingClientRect();
        const found = document.elementsFromPoint(box.left + box.width / 2, box.top + box.height / 2);
        for (const one of found) {
            const style = getComputedStyle(one);
            const isPath = one.tagName === "path" || one.tagName === "use";
            if (isPath && opaque(style.fill) && style.fillOpacity > 0.5 && style.opacity > 0.5) return style.fill;
            if (!isPath && opaque(style.backgroundColor)) return style.backgroundColor;
        }
        return getComputedStyle(document.body).backgroundColor;
    };
    const pale = [];
    const drawn = [...document.querySelectorAll(".picture svg text")].filter(shown);
    const written = [...document.querySelectorAll("main *")].filter((one) => shown(one) && !one.closest("svg")
        && [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
    for (const one of [...drawn, ...written]) {
        const style = getComputedStyle(one);
        const ratio = contrast(drawn.includes(one) ? style.fill : style.color, behind(one));
        if (ratio < 4.5) pale.push(`${one.textContent.slice(0, 40)}: ${ratio.toFixed(2)}`);
    }
    const over = [];
    for (const svg of document.querySelectorAll(".picture svg")) {
        const texts = [...svg.querySelectorAll("text")].filter((one) => shown(one) && one.textContent.trim());
        const boxes = texts.map((one) => one.getBoundingClientRect());
        const whole = svg.getBoundingClientRect();
        texts.forEach((one, place) => {
            const mine = boxes[place];
            if (mine.left < whole.left - 2 || mine.right > whole.right + 2) over.push(`${one.textContent} is cut`);
            for (let other = place + 1; other < texts.length; other++) {
                const its = boxes[other];
                const wide = Math.min(mine.right, its.right) - Math.max(mine.left, its.left);
                const high = Math.min(mine.bottom, its.bottom) - Math.max(mine.top, its.top);
                const least = Math.min(mine.width * mine.height, its.width * its.height);
                if (wide > 0 && high > 0 && wide * high > 0.2 * least)
                    over.push(`${svg.closest("section").id}: ${one.textContent} | ${texts[other].textContent}`);
            }
        });
    }
    const boxes = [...document.querySelectorAll("main *")].filter((one) => shown(one) && !one.closest("svg"));
    return {
        over, pale,
        sideways: document.documentElement.scrollWidth - document.documentElement.clientWidth,
        wide: boxes.filter((one) => one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".scroll, pre"))
            .map((one) => one.tagName + "." + one.className),
        clipped: [...document.querySelectorAll("pre, .scroll")].filter(shown)
            .filter((one) => one.scrollHeight > one.clientHeight + 1 || one.scrollWidth > one.clientWidth + 1)
            .map((one) => one.textContent.trim().slice(0, 60)),
    };
})()
