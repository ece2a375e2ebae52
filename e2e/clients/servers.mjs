// A real MCP server (/mcp) and a real A2A agent (/a2a) on one port, which is the first line of
// standard output. They end with standard input.
import { randomUUID } from 'node:crypto';
import express from 'express';
import { z } from 'zod';
import { McpServer } from '@modelcontextprotocol/sdk/server/mcp.js';
import { StreamableHTTPServerTransport } from '@modelcontextprotocol/sdk/server/streamableHttp.js';
import { InMemoryEventStore } from '@modelcontextprotocol/sdk/examples/shared/inMemoryEventStore.js';
import { isInitializeRequest } from '@modelcontextprotocol/sdk/types.js';
import { AgentEvent, DefaultRequestHandler, InMemoryTaskStore } from '@a2a-js/sdk/server';
import { UserBuilder, jsonRpcHandler } from '@a2a-js/sdk/server/express';
import { card } from './agents.mjs';

let effects = 0;

function tools() {
	const server = new McpServer({ name: 'typescript', version: '1' });
	const text = (text) => ({ content: [{ type: 'text', text }] });
	server.registerTool('peek', { inputSchema: { amount: z.number() }, annotations: { readOnlyHint: true } }, ({ amount }) => text(`peek ${amount}`));
	server.registerTool('pay', { inputSchema: { amount: z.number() } }, () => text(`effect-${++effects}`));
	server.registerTool('slow', { inputSchema: { amount: z.number() } }, async ({ amount }, { _meta, sendNotification }) => {
		for (let progress = 1; progress <= 2 && _meta?.progressToken !== undefined; progress++) {
			await sendNotification({ method: 'notifications/progress', params: { progressToken: _meta.progressToken, progress, total: 2 } });
		}
		return text(`slow ${amount}`);
	});
	// It works until its client cancels the call. The SDK then sends no answer.
	server.registerTool('stuck', { inputSchema: { amount: z.number() } }, async ({ amount }, { _meta, signal, sendNotification }) => {
		const cancelled = new Promise((resolve) => signal.addEventListener('abort', resolve));
		await sendNotification({ method: 'notifications/progress', params: { progressToken: _meta.progressToken, progress: 1, total: 2 } });
		await cancelled;
		return text(`stuck ${amount}`);
	});
	// It answers on a stream that its client has to resume.
	server.registerTool('later', { inputSchema: { amount: z.number() } }, async ({ amount }, { closeSSEStream }) => {
		const effect = `effect-${++effects} of ${amount}`;
		closeSSEStream?.();
		await new Promise((resolve) => setTimeout(resolve, 300));
		return text(effect);
	});
	server.registerResource('note', 'note://1', {}, () => ({ contents: [{ uri: 'note://1', text: 'a note' }] }));
	return server;
}

const app = express();
const sessions = {};
app.all('/mcp', express.json(), async (req, res) => {
	let transport = sessions[req.headers['mcp-session-id']];
	if (!transport && isInitializeRequest(req.body)) {
		const resumable = req.body.params.clientInfo.name === 'resuming' && { eventStore: new InMemoryEventStore(), retryInterval: 50 };
		transport = new StreamableHTTPServerTransport({ sessionIdGenerator: randomUUID, onsessioninitialized: (id) => { sessions[id] = transport; }, ...resumable });
		await tools().connect(transport);
	}
	if (!transport) {
		res.status(404).json({ jsonrpc: '2.0', id: null, error: { code: -32000, message: 'no such session' } });
		return;
	}
	await transport.handleRequest(req, res, req.body);
});

const agent = {
	async execute({ userMessage, contextId }, bus) {
		bus.publish(AgentEvent.message({
			messageId: randomUUID(), contextId, taskId: '', role: 2, metadata: undefined, extensions: [], referenceTaskIds: [],
			parts: [{ content: { $case: 'text', value: `effect-${++effects}` }, metadata: undefined, filename: '', mediaType: '' }],
		}));
		bus.finished();
	},
	async cancelTask() {},
};
app.use('/a2a', jsonRpcHandler({
	requestHandler: new DefaultRequestHandler(card('http://localhost/a2a'), new InMemoryTaskStore(), agent), userBuilder: UserBuilder.noAuthentication,
}));

const listener = app.listen(0, '127.0.0.1', () => process.stdout.write(listener.address().port + '\n'));
process.stdin.on('end', () => process.exit()).resume();
