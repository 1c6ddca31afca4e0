// Answers cases from stdin, a JSON object {shared, cases: [{op, …}]} a line, each line with one, a JSON list. A case that
// is refused answers {"error": message}.

import { createInterface } from "node:readline";

export async function answerCases(operations, isRefusal = () => false) {
  for await (const line of createInterface({ input: process.stdin })) {
    const { shared, cases } = JSON.parse(line), answers = [];
    for (const { op, ...given } of cases) {
      try {
        answers.push(await operations[op](given, shared));
      } catch (error) {
        if (error.constructor !== Error && !isRefusal(error)) throw error; // a TypeError is a mistake of ours
        answers.push({ error: error.message });
      }
    }
    process.stdout.write(`${JSON.stringify(answers)}\n`);
  }
}
