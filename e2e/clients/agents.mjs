// Programs over the SDKs of agents' protocols. They call again what failed, as agents do: the
// SDKs of MCP and A2A do not by themselves.
import { randomUUID } from 'node:crypto';
import Anthropic from '@anthropic-ai/sdk';
import OpenAI from 'openai';
import Stripe from 'stripe';
import { Client } from '@modelcontextprotocol/sdk/client/index.js';
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js';
import { ClientFactory, JsonRpcTransportFactory } from '@a2a-js/sdk/client';

// card is that of the agent in servers.mjs.
export function card(url) {
	return {
		name: 'agent', description: 'pays', version: '1', provider: undefined, securitySchemes: {}, securityRequirements: [], signatures: [],
		supportedInterfaces: [{ url, protocolBinding: 'JSONRPC', tenant: '', protocolVersion: '1.0' }],
		capabilities: { streaming: true, pushNotifications: false, extensions: [] },
		defaultInputModes: ['text'], defaultOutputModes: ['text'], skills: [],
	};
}

export const backoff = 1000; // milliseconds until a program calls again

// often makes a call as many times as it is meant, each time until it succeeds.
async function often({ times, retries }, call) {
	let value;
	for (let n = 0; n < times; n++) {
		for (let tried = 0; ; tried++) {
			try {
				value = await call(n, tried);
				break;
			} catch (err) {
				if (tried >= retries) throw err;
				await new Promise((resolve) => setTimeout(resolve, backoff));
			}
		}
	}
	return value;
}

async function mcp({ base, key }, name = 'program') {
	const client = new Client({ name, version: '1' });
	await client.connect(new StreamableHTTPClientTransport(new URL(base + '/mcp'), { requestInit: { headers: { Authorization: 'Bearer ' + key } } }));
	return client;
}

// text is what a tool says. One that failed is an error to the program.
function text(result) {
	const said = result.content?.map((part) => part.text ?? part.type).join(' ');
	if (result.isError) throw Object.assign(new Error(said), { name: 'tool' });
	return said;
}

async function pay(task, meta) {
	const client = await mcp(task);
	try {
		return { id: await often(task, async (n) => text(await client.callTool(
			{ name: 'pay', arguments: { amount: task.amount }, ...meta?.(n) }, undefined, { timeout: task.timeout || 60000 }))) };
	} finally {
		await client.close();
	}
}

export const agents = {
	async 'openai, no key'({ base, key, amount, retries, timeout, times }) {
		const openai = new OpenAI({ apiKey: key, baseURL: base + '/v1', maxRetries: retries, timeout: timeout || 60000 });
		return often({ times, retries: 0 }, () => openai.chat.completions.create({ model: 'm', messages: [{ role: 'user', content: `pay ${amount}` }] }));
	},
	async 'anthropic, no key'({ base, key, amount, retries, timeout, times }) {
		const anthropic = new Anthropic({ apiKey: key, baseURL: base, maxRetries: retries, timeout: timeout || 60000 });
		return often({ times, retries: 0 }, () => anthropic.messages.create({ model: 'm', max_tokens: 1, messages: [{ role: 'user', content: `pay ${amount}` }] }));
	},
	async 'stripe, its own key'({ base, key, amount, retries, timeout, times }) {
		const { hostname, port } = new URL(base);
		const stripe = new Stripe(key, { host: hostname, port, protocol: 'http', telemetry: false, maxNetworkRetries: retries, timeout: timeout || 60000 });
		return often({ times, retries: 0 }, () => stripe.paymentIntents.create({ amount, currency: 'eur' }));
	},
	'mcp-ts': (task) => pay(task),
	// The key is made once for each call that is meant.
	'mcp-ts, key in _meta': (task) => {
		const keys = Array.from({ length: task.times }, randomUUID);
		return pay(task, (n) => ({ _meta: { 'idempotency-key': keys[n] } }));
	},
	async 'a2a-js'({ base, key, amount, retries, timeout, times }) {
		const agent = await new ClientFactory({ transports: [new JsonRpcTransportFactory()] }).createFromAgentCard(card(base + '/a2a'));
		const ids = Array.from({ length: times }, randomUUID);
		const answer = await often({ times, retries }, (n) => agent.sendMessage({
			tenant: '', configuration: undefined, metadata: undefined,
			message: {
				messageId: ids[n], contextId: '', taskId: '', role: 1, metadata: undefined, extensions: [], referenceTaskIds: [],
				parts: [{ content: { $case: 'text', value: `pay ${amount}` }, metadata: undefined, filename: '', mediaType: '' }],
			},
		}, { serviceParameters: { Authorization: 'Bearer ' + key }, signal: AbortSignal.timeout(timeout || 60000) }));
		return { id: answer.parts?.[0]?.content?.value };
	},
	// What comes of a message that is streamed, twice with one id, and of a task that is not there.
	async 'a2a-js tour'({ base, key, amount }) {
		const agent = await new ClientFactory({ transports: [new JsonRpcTransportFactory()] }).createFromAgentCard(card(base + '/a2a'));
		const options = { serviceParameters: { Authorization: 'Bearer ' + key } };
		const messageId = randomUUID(), log = [];
		for (let n = 0; n < 2; n++) {
			for await (const event of agent.sendMessageStream({
				tenant: '', configuration: undefined, metadata: undefined,
				message: {
					messageId, contextId: '', taskId: '', role: 1, metadata: undefined, extensions: [], referenceTaskIds: [],
					parts: [{ content: { $case: 'text', value: `pay ${amount}` }, metadata: undefined, filename: '', mediaType: '' }],
				},
			}, options)) log.push(`${event.payload?.$case}: ${event.payload?.value?.parts?.[0]?.content?.value}`);
		}
		log.push(await agent.getTask({ tenant: '', id: 'nothing', historyLength: undefined }, options).then(() => 'a task', (err) => err.constructor.name));
		return { id: log.join('\n') };
	},
	// What comes of two payments in one batch, and of one of them alone.
	async 'mcp-ts, batch'(task) {
		const client = await mcp(task);
		const said = {};
		client.transport.onmessage = (message) => { said[message.id] = message.result ? text(message.result) : message.error?.message; };
		const call = (id, key) => ({
			jsonrpc: '2.0', id, method: 'tools/call', params: { name: 'pay', arguments: { amount: task.amount }, _meta: { 'idempotency-key': key } },
		});
		try {
			const refused = await client.transport.send([call(11, 'a'), call(12, 'b')]).then(() => 'sent', (err) => err.message);
			await client.transport.send(call(21, 'a'));
			while (said[21] === undefined) await new Promise((resolve) => setTimeout(resolve, 5));
			return { id: refused + '\n' + said[21] };
		} finally {
			await client.close();
		}
	},
	async 'mcp-ts, in doubt'(task) {
		const client = await mcp(task);
		try {
			const call = (name) => client.callTool({ name, arguments: { amount: task.amount } }).then(text, (err) => err.message);
			return { id: await call('pay') + '\n' + await call('peek') };
		} finally {
			await client.close();
		}
	},
	// What comes of a call that the program gives up while its server works, as the SDK does after a timeout,
	// and of the same call again.
	async 'mcp-ts, cancelled'(task) {
		const client = await mcp(task);
		const call = (signal, onprogress) => client.callTool({ name: 'stuck', arguments: { amount: task.amount } }, undefined, { signal, onprogress })
			.then(text, (err) => `${err.code} ${err.data?.error?.code}`);
		try {
			const gives = new AbortController();
			await call(gives.signal, () => gives.abort());
			return { id: await call(undefined, () => {}) };
		} finally {
			await client.transport.terminateSession();
			await client.close();
		}
	},
	// What comes of calls that are answered on streams which have to be resumed: twice with one key, then
	// twice without.
	async 'mcp-ts, resumed'(task) {
		const client = await mcp(task, 'resuming');
		try {
			const call = (meta) => client.callTool({ name: 'later', arguments: { amount: task.amount }, ...meta }).then(text);
			const keyed = { _meta: { 'idempotency-key': randomUUID() } };
			return { id: [await call(keyed), await call(keyed), await call(), await call()].join('\n') };
		} finally {
			await client.close();
		}
	},
	// tour does what programs do with a server, and tells what came of it.
	async 'mcp-ts tour'(task) {
		const client = await mcp(task);
		const log = [JSON.stringify(client.getServerVersion())];
		try {
			await client.ping();
			log.push((await client.listTools()).tools.map((tool) => tool.name).sort().join(' '));
			const capabilities = client.getServerCapabilities();
			if (capabilities?.resources) {
				const { resources } = await client.listResources();
				const read = await client.readResource({ uri: resources[0].uri });
				log.push(`${resources.length} resources, ${read.contents.length} contents`);
			}
			if (capabilities?.prompts) log.push((await client.listPrompts()).prompts.length + ' prompts');
			for (const { name, args, progress: expected } of task.calls) {
				const progress = [];
				const result = await client.callTool({ name, arguments: args }, undefined, { onprogress: (p) => expected && progress.push(`${p.progress}/${p.total}`) });
				log.push(`${name}: ${text(result)} ${progress.join(' ')}`.trim());
			}
			const missing = await client.callTool({ name: 'nothing', arguments: {} }).then((r) => 'isError ' + r.isError, (err) => 'error ' + err.code);
			log.push('nothing: ' + missing);
			await client.transport.terminateSession();
		} finally {
			await client.close();
		}
		return { id: log.join('\n') };
	},
};
