// Checks of a client: each is a function whose result the suite compares.
const results = {};

export async function check(name, run) {
  try {
    results[name] = await run();
  } catch (error) {
    results[name] = `failed: ${error?.stack ?? error}`;
  }
}

export function report() {
  console.log(JSON.stringify(results));
}
