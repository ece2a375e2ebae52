// Makes calls with the SDKs of package.json. Each line of standard input is a call, each
// line of standard output what the calling code saw of one.
import readline from 'node:readline';
import Stripe from 'stripe';
import OpenAI from 'openai';
import Anthropic from '@anthropic-ai/sdk';
import { agents } from './agents.mjs';
import { files } from './files.mjs';

const clients = {
	...agents,
	...files,
	async stripe({ base, key, amount, retries }) {
		const { hostname, port } = new URL(base);
		const stripe = new Stripe('sk_test_1', { host: hostname, port, protocol: 'http', telemetry: false });
		return stripe.paymentIntents.create({ amount, currency: 'eur' }, { idempotencyKey: key, maxNetworkRetries: retries });
	},
	async openai({ base, key, amount, retries }) {
		const openai = new OpenAI({ apiKey: 'k', baseURL: base + '/v1' });
		return openai.chat.completions.create(
			{ model: 'm', messages: [{ role: 'user', content: `pay ${amount}` }] },
			{ headers: { 'Idempotency-Key': key }, maxRetries: retries },
		);
	},
	async anthropic({ base, key, amount, retries }) {
		const anthropic = new Anthropic({ apiKey: 'k', baseURL: base });
		return anthropic.messages.create(
			{ model: 'm', max_tokens: 1, messages: [{ role: 'user', content: `pay ${amount}` }] },
			{ headers: { 'Idempotency-Key': key }, maxRetries: retries },
		);
	},
};

// seen is what an error tells the code that catches it.
function seen(err) {
	if (err.name === 'tool') return 'gets a tool result that is an error';
	const code = err.error?.error?.code ?? err.error?.code ?? err.code ?? err.raw?.code;
	// In the data of a JSON-RPC error stands the gateway's problem.
	const problem = (err.data ?? err.errorData ?? err.envelope?.data)?.error?.code;
	return ['throws', err.constructor.name, err.status ?? err.statusCode, code, problem].filter((v) => v != null).join(' ');
}

for await (const line of readline.createInterface({ input: process.stdin })) {
	const call = JSON.parse(line);
	clients[call.client](call).then(
		(value) => ({ ok: true, id: String(value?.id), seen: 'succeeds' }),
		(err) => ({ ok: false, id: '', seen: seen(err) }),
	).then((result) => process.stdout.write(JSON.stringify({ n: call.n, ...result }) + '\n'));
}
