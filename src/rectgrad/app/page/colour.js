// Colours maps with the library's colour tables, so that they look the same as those of rectgrad.image.

import { about, isDark, state } from "./state.js";

const FULL = 32767;

export function schemeOf(map) {
  if (state.colours !== "auto") return state.colours;
  return (map.signed ? "signed" : "unsigned") + (isDark() ? "_dark" : "");
}

/** Draws a map on a canvas, one pixel per value; with a strength, as an overlay for a pale photo. */
export function draw(canvas, map, strength = 0) {
  const scheme = schemeOf(map);
  const table = about.colours[scheme];
  const signed = scheme.startsWith("signed");
  canvas.width = map.width;
  canvas.height = map.height;
  const picture = new ImageData(map.width, map.height);
  const pixels = picture.data;
  for (let i = 0; i < map.data.length; i++) {
    let value = map.data[i] / FULL;
    let alpha = 1;
    if (strength) {
      // Weak values are transparent rather than pale, because a pale tint would only fog the photo.
      const weight = Math.abs(value);
      alpha = Math.sqrt(weight) * strength;
      value = Math.sign(value) * (0.5 + 0.5 * weight);
    }
    const place = Math.min(Math.max(signed ? (value + 1) / 2 : value, 0), 1);
    const colour = table[Math.round(place * 255)];
    pixels[4 * i] = colour[0];
    pixels[4 * i + 1] = colour[1];
    pixels[4 * i + 2] = colour[2];
    pixels[4 * i + 3] = Math.round(alpha * 255);
  }
  canvas.getContext("2d").putImageData(picture, 0, 0);
}

/** Draws a photo unchanged, or pale and nearly grey as the background of a map. */
export function drawPhoto(canvas, photo, pale = false) {
  canvas.width = photo.naturalWidth;
  canvas.height = photo.naturalHeight;
  const context = canvas.getContext("2d", { willReadFrequently: pale });
  context.drawImage(photo, 0, 0);
  if (!pale) return;
  const picture = context.getImageData(0, 0, canvas.width, canvas.height);
  const pixels = picture.data;
  const dark = isDark();
  for (let i = 0; i < pixels.length; i += 4) {
    const grey = 0.299 * pixels[i] + 0.587 * pixels[i + 1] + 0.114 * pixels[i + 2];
    for (let c = 0; c < 3; c++) {
      const faded = 0.55 * (0.75 * grey + 0.25 * pixels[i + c]);
      pixels[i + c] = dark ? 0.8 * faded : faded + 0.45 * 255;
    }
  }
  context.putImageData(picture, 0, 0);
}

/** Draws the colour scale of a map from left to right. */
export function drawScale(canvas, map) {
  const table = about.colours[schemeOf(map)];
  canvas.width = table.length;
  canvas.height = 1;
  const picture = new ImageData(table.length, 1);
  table.forEach((colour, i) => picture.data.set([...colour, 255], 4 * i));
  canvas.getContext("2d").putImageData(picture, 0, 0);
}
