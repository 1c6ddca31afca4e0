/** Lets the messages in that have arrived meanwhile, without the pause of a timer. One channel: each costs the collector. */

const { port1, port2 } = new MessageChannel(), waiting = [];
port1.onmessage = () => {
  waiting.shift()();
  if (!waiting.length) port1.unref?.(); // node would not end
};
port1.unref?.();

export const othersFirst = () => new Promise((resolve) => {
  waiting.push(resolve);
  port1.ref?.();
  port2.postMessage(null);
});
