// Scale of heat maps: viridis (van der Walt and Smith). Its lightness is monotonic, for color-blind readers, too.
const STOPS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];

export const SHADES = Uint8ClampedArray.from({ length: 256 * 3 }, (_, place) => {
  const position = (Math.floor(place / 3) / 255) * (STOPS.length - 1);
  const stop = Math.min(Math.floor(position), STOPS.length - 2);
  const [low, high] = [STOPS[stop][place % 3], STOPS[stop + 1][place % 3]];
  return low + (high - low) * (position - stop);
});

export const series = (number) => `series-${number % 8}`;
